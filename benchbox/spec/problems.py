"""Messages for the errors of pydantic, each at its line and column in the file."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from benchbox.errors import Problem
from benchbox.registry.names import did_you_mean
from benchbox.spec.fields import Point

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from benchbox.spec.source import Keys, Source

KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "model_type": "a mapping",
    "dict_type": "a mapping",
}
BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def problems_of(
    error: ValidationError, model: type[BaseModel], source: Source, earlier: Iterable[Problem] = ()
) -> list[Problem]:
    """Return one problem for each error of pydantic in a file of that model.

    Args:
        earlier: problems found in reading the file. Where there is one, the value that was read is not the one in the file.
    """
    unreadable = {problem.where for problem in earlier}
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        loc = tuple(part for part in detail["loc"] if not str(part).startswith("<"))
        if detail["type"] == "extra_forbidden":
            hint = _section_hint(model, loc) or did_you_mean(str(loc[-1]), _keys_at(model, loc[:-1]))
            problem = Problem(source.where(loc, key=True), f"unknown key {loc[-1]!r}", hint)
        else:
            problem = _problem(detail["type"], loc, detail, source)
        # An axis with a wrong name is one problem, however many values it has.
        if problem.where not in unreadable:
            problems.setdefault(f"{problem.where} {problem.message}", problem)
    return list(problems.values())


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Sort problems from top to bottom of the file; those of the command line, which have no line, come last."""

    def position(problem: Problem) -> tuple[bool, int, int]:
        line, column = (["", "", *problem.where.rsplit(":", 2)])[-2:]
        return (False, int(line), int(column)) if line.isdigit() and column.isdigit() else (True, 0, 0)

    return sorted(problems, key=position)


def dotted_path(keys: Keys) -> str:
    """Return the path of a value as text: `axes.batch[1]`."""
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def shorten(value: Any) -> str:
    """Return a value as it would be written in the file, at most 40 characters long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def _problem(kind: str, loc: Keys, detail: Mapping[str, Any], source: Source) -> Problem:
    context, value = detail.get("ctx", {}), detail["input"]
    name, where = dotted_path(loc), source.where(loc)
    if loc[:1] == ("axes",) and 2 <= len(loc) <= 3 and loc[1] not in Point.model_fields and kind in KINDS:
        # It is not a list of points, so not a zipped axis: this must be a misspelt field.
        hint = did_you_mean(str(loc[1]), Point.model_fields) or "a zipped axis is a list of mappings"
        return Problem(source.where(loc[:2], key=True), f"unknown axis {loc[1]!r}", hint)
    match kind:
        case "refused":
            return Problem(where, context["message"], context["hint"])
        case "missing":
            return Problem(source.where(loc[:-1]), f"{dotted_path(loc[:-1]) or 'the file'} needs the key {loc[-1]!r}")
        case "literal_error":
            words = re.findall(r"'([^']*)'", context["expected"])
            field = next(part for part in reversed(loc) if isinstance(part, str))  # a value of an axis has a number
            return Problem(where, f"unknown {field} {shorten(value)}", did_you_mean(str(value), words))
        case "too_short" if context["min_length"] == 1:
            return Problem(where, f"{name} is empty", "give at least one value, or take the key out")
        case "too_short" | "too_long":
            length = context.get("min_length") or context.get("max_length")
            return Problem(where, f"{name} must have {length} values, and has {context['actual_length']}")
        case "string_too_short":
            return Problem(where, f"{name} is empty")
        case "string_pattern_mismatch":
            return Problem(where, f"{name} {shorten(value)} is not a name", "use letters, digits, '.', '_' and '-'")
    if kind in BOUNDS:
        relation, key = BOUNDS[kind]
        return Problem(where, f"{name} must be {relation} {context[key]}, not {shorten(value)}")
    if kind in KINDS:
        return Problem(where, f"{name} must be {KINDS[kind]}, not {shorten(value)}", _conversion_hint(kind, value))
    return Problem(where, f"{name}: {detail['msg']}")


def _conversion_hint(kind: str, value: Any) -> str | None:
    if kind == "string_type" and isinstance(value, int | float):
        return "put it in quotes"
    if kind in {"int_type", "float_type"} and isinstance(value, str) and value.strip().replace(".", "", 1).isdigit():
        return "take the quotes off"
    if kind == "bool_type" and str(value).lower() in {"yes", "on", "no", "off", "0", "1"}:
        return "write true or false"
    return None


def _keys_at(model: type[BaseModel], loc: Keys) -> Iterable[str]:
    """Return the keys that the mapping at `loc` of a file of that model may have."""
    for key in loc:
        if isinstance(key, str):
            hints = get_type_hints(model)
            model = _model_in(hints.get(key, hints.get("__pydantic_extra__"))) or model
    return model.model_fields


def _section_hint(model: type[BaseModel], loc: Keys) -> str | None:
    """Return in which section of the file an unknown key at its top level belongs, if in one."""
    if len(loc) > 1:
        return None
    sections = {name: _model_in(hint) for name, hint in get_type_hints(model).items() if name in model.model_fields}
    names = [name for name, section in sections.items() if section is not None and loc[0] in section.model_fields]
    return f"it belongs to {names[0]}: write {names[0]}.{loc[0]}" if names else None


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model within a type: the type itself, the items of a list, or one member of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
