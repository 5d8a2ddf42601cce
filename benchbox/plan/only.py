"""`--only`: the cells of a matrix that a small expression selects.

Conditions are joined by commas, and all of them must hold:

    backend=zero2              the field has the value
    cams!=1                    it has another
    backend in [zero2, ddp]    it has one of these
    recipe not in [bf16_pure]  it has none of these

Values are YAML, and yes and no are true and false, as reports print them; fields are those of a cell. A value that no cell has
is refused, since it must be a mistake. The conditions of several expressions must all hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.names import did_you_mean
from benchbox.spec.cell import POINT_FIELDS
from benchbox.spec.matrix import to_yaml_word
from benchbox.spec.overrides import split_at_commas
from benchbox.spec.source import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchbox.spec.cell import Cell

FIELDS = tuple(field.name for field in POINT_FIELDS)
_FLAGS = {field.name for field in POINT_FIELDS if isinstance(field.default, bool)}
_WORDS = {"yes": True, "no": False}  # of labels in reports, which YAML 1.2 reads as text
CONDITION = re.compile(r"(?P<field>\w+)\s*(?P<relation>!=|=|\bnot\s+in\b|\bin\b)\s*(?P<value>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition: the value of a field is (or is not) one of some values."""

    text: str
    field: str
    values: tuple[Any, ...]
    negated: bool

    def accepts(self, cell: Cell) -> bool:
        """Return whether the condition is true of a cell."""
        return contains(self.values, getattr(cell, self.field)) != self.negated


def contains(values: Iterable[Any], value: Any) -> bool:
    """Return whether the value is among `values`, with its type: in Python 1 == True, and cams=1 is not cams=true."""
    return any(type(candidate) is type(value) and candidate == value for candidate in values)


def join_expressions(expressions: Iterable[str]) -> str:
    """Return one expression with the conditions of all expressions."""
    return ", ".join(filter(str.strip, expressions))


def select(expression: str, cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells that an expression selects, in their order; all of them when it is empty.

    Raises:
        ConfigurationError: it is not an expression, names an unknown field, a value no cell has, or selects nothing.
    """
    cells = list(cells)
    if not expression.strip():
        return cells
    conditions: list[Condition] = []
    problems: list[Problem] = []
    for part in split_at_commas(expression):
        try:
            conditions.append(_condition(part or expression))
        except ConfigurationError as error:
            problems.extend(error.problems)
    problems += [problem for condition in conditions for problem in _unknown_values(condition, cells)]
    if problems:
        raise ConfigurationError(problems)
    chosen = [cell for cell in cells if all(condition.accepts(cell) for condition in conditions)]
    if not chosen:
        raise ConfigurationError(Problem(f"--only {expression}", f"selects none of the {len(cells)} cells"))
    return chosen


def _condition(text: str) -> Condition:
    position = f"--only {text}"
    match = CONDITION.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            Problem(position, "is not a condition", "write it as backend=zero2 or backend in [zero2, ddp]")
        )
    field = match["field"]
    if field not in FIELDS:
        raise ConfigurationError(Problem(position, f"unknown field {field!r}", did_you_mean(field, FIELDS)))
    parsed = parse(match["value"], position, position=position)
    if parsed.problems:
        raise ConfigurationError(parsed.problems)
    value = parsed.values
    listed = match["relation"].endswith("in")
    if listed != isinstance(value, list) or isinstance(value, dict):
        hint = f"write it as {field} in [...]" if isinstance(value, list) else "after 'in' comes a list: [a, b]"
        raise ConfigurationError(Problem(position, "is not a condition", hint))
    values = value if listed else [value]
    if field in _FLAGS:
        values = [_WORDS.get(item, item) if isinstance(item, str) else item for item in values]
    return Condition(text, field, tuple(values), match["relation"].startswith(("!", "not")))


def _unknown_values(condition: Condition, cells: list[Cell]) -> Iterator[Problem]:
    existing = tuple(dict.fromkeys(getattr(cell, condition.field) for cell in cells))
    for value in condition.values:
        if not contains(existing, value):
            message = f"no cell has {condition.field} {to_yaml_word(value)}"
            yield Problem(f"--only {condition.text}", message, f"there is {', '.join(map(to_yaml_word, existing))}")
