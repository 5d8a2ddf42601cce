"""Keys of a matrix file with their types, defaults and meanings, from the schema that files are checked with."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from benchbox.spec.cell import Cell
from benchbox.spec.schema import json_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Sections whose keys have a row each: the others are lists, or mappings with keys of the user's own.
_SECTIONS = ("data", "optim", "measure")


def matrix_keys() -> list[dict[str, str]]:
    """Return a row for each key of a matrix; keys of a section follow it, as in `measure.steps`."""
    schema = json_schema()
    return list(_rows(schema["properties"], set(schema["required"]), schema["$defs"]))


def _rows(keys: Mapping[str, Any], required: set[str], definitions: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    # A cell needs fields without a default, but an axis may give them in place of the top level.
    defaults = {field.name: field.default for field in fields(Cell) if field.default_factory is MISSING}
    for name, key in keys.items():
        default = key.get("default", defaults.get(name))
        text = "required" if name in required else "required, here or as an axis" if default is MISSING else _default(default)
        yield {"name": name, "type": _type(key), "default": text, "meaning": key["description"]}
        if name in _SECTIONS:
            section = definitions[_reference(key)]["properties"]
            for part, nested in section.items():
                yield {
                    "name": f"{name}.{part}",
                    "type": _type(nested),
                    "default": _default(nested.get("default")),
                    "meaning": nested["description"],
                }


def _default(value: Any) -> str:
    return "" if value is None or value == [] else value if isinstance(value, str) else json.dumps(value)


def _reference(key: Mapping[str, Any]) -> str:
    """Return the name of the definition of a section; `data` may also be a word."""
    options = key.get("oneOf", [key])
    return next(option["$ref"] for option in options if "$ref" in option).rpartition("/")[2]


def _type(key: Mapping[str, Any]) -> str:
    """Return the type of a key in words: what else a name may be is in the list of its kind."""
    if options := key.get("oneOf"):
        return " or ".join(map(_type, options))
    if "anyOf" in key:
        return "string"
    if words := key.get("enum"):
        return ", ".join(map(str, words))
    kind = key.get("type", "object")
    names = [kind] if isinstance(kind, str) else kind
    return " or ".join({"object": "mapping", "array": "list"}.get(name, name) for name in names)
