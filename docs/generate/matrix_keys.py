"""Keys of a matrix file with their types, defaults and meanings, from the schema that files are checked with."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from benchbox.spec.cell import Cell
from benchbox.spec.schema import MatrixFile, json_schema
from benchbox.spec.train import TrainFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Definitions of the schema whose keys are fields of a cell.
_FIELDS_OF_CELLS = ("AxesFile", "Point", "SelectedCells")


def matrix_keys() -> list[dict[str, str]]:
    """Return a row for each key of a matrix; keys of a section follow it, as in `measure.steps`."""
    schema = json_schema(MatrixFile)
    return list(_rows(schema["properties"], schema))


def training_keys() -> list[dict[str, str]]:
    """Return a row for each key of a training file that a matrix does not have."""
    schema, shared = json_schema(TrainFile), json_schema(MatrixFile)["properties"]
    return list(_rows({name: key for name, key in schema["properties"].items() if name not in shared}, schema))


def _rows(keys: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    # A cell needs fields without a default, but an axis may give them in place of the top level.
    defaults = {field.name: field.default for field in fields(Cell) if field.default_factory is MISSING}
    for name, key in keys.items():
        default = key.get("default", defaults.get(name))
        required = "required, here or as an axis" if default is MISSING else None
        yield _row(name, key, "required" if name in schema["required"] else required or _default(default))
        yield from _section(name, key, schema["$defs"])


def _section(name: str, key: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield a row for each key of a section, or of the items of a list."""
    definition = _definition(key)
    if definition is None or definition in _FIELDS_OF_CELLS:
        return
    section = definitions[definition]
    for part, nested in section["properties"].items():
        needed = part in section.get("required", ())
        yield _row(f"{name}.{part}", nested, "required" if needed else _default(nested.get("default")))
        yield from _section(f"{name}.{part}", nested, definitions)


def _row(name: str, key: Mapping[str, Any], default: str) -> dict[str, str]:
    return {"name": name, "type": _type(key), "default": default, "meaning": key.get("description", "")}


def _definition(key: Mapping[str, Any]) -> str | None:
    """Return the name of the definition that a key, one of its alternatives or the items of its list refer to."""
    options = [*key.get("oneOf", ()), *key.get("anyOf", ()), key.get("items", {}), key]
    return next((option["$ref"].rpartition("/")[2] for option in options if "$ref" in option), None)


def _default(value: Any) -> str:
    return "" if value is None or value == [] else value if isinstance(value, str) else json.dumps(value)


def _type(key: Mapping[str, Any]) -> str:
    """Return the type of a key in words: what else a name may be is in the list of its kind."""
    if options := key.get("oneOf"):
        return " or ".join(map(_type, options))
    if options := [option for option in key.get("anyOf", ()) if option.get("type") != "null"]:
        return "string" if len(options) > 1 else _type(options[0])
    if words := key.get("enum"):
        return ", ".join(map(str, words))
    if "const" in key:
        return str(key["const"])
    kind = key.get("type", "object")
    names = [kind] if isinstance(kind, str) else kind
    return " or ".join({"object": "mapping", "array": "list"}.get(name, name) for name in names)
