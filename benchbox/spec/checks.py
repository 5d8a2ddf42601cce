"""What no single field can show: keys that exclude one another, points that are incomplete, selections that select nothing."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.errors import DataError, Problem
from benchbox.registry.names import did_you_mean
from benchbox.registry.weights import weight_files
from benchbox.spec.cell import Cell
from benchbox.spec.fields import Point
from benchbox.spec.matrix import describe, matches, word

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.registry.policies import PolicyEntry
    from benchbox.spec.cell import DataSpec
    from benchbox.spec.matrix import Matrix
    from benchbox.spec.source import Keys, Source

MAX_CELLS = 10_000
NEEDED = [f.name for f in fields(Cell) if f.default is MISSING and f.default_factory is MISSING]


def structure(source: Source) -> list[Problem]:
    """Problems between keys. Looks at the plain values and steps over what has the wrong type: that is reported elsewhere."""
    found: list[Problem] = []
    axes = source.values.get("axes", {})
    readable = isinstance(axes, dict)
    axes = axes if isinstance(axes, dict) else {}
    owner: dict[str, str] = {}  # of a field: the axis that varies it
    for name, values in axes.items():
        points = [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
        keys = [name] if name in Point.model_fields else list(points[0]) if points else []
        readable = readable and bool(keys)
        for key in keys:
            where = source.where(("axes", name), key=True)
            if key in source.values:
                found.append(_both(key, source, where))
            if key in owner:
                found.append(Problem(where, f"axis {name} varies {key}, which axis {owner[key]} varies already"))
            owner.setdefault(key, name)
        for index, point in enumerate(points):
            if not point:
                found.append(Problem(source.where(("axes", name, index)), f"this point of axis {name} is empty"))
            elif point.keys() != points[0].keys():
                message = f"every point of axis {name} needs the same keys: {', '.join(points[0])}"
                found.append(Problem(source.where(("axes", name, index)), message))
    found += _too_many(source, axes)
    if readable:  # an axis whose name is wrong would be reported again as a field that is not given
        found += _incomplete(source, owner)
    return found


def _both(key: str, source: Source, axis_place: str) -> Problem:
    place = source.where((key,), key=True)
    if place.startswith("--set"):
        return Problem(place, f"{key} is an axis, at {axis_place}", f"set axes.{key}=[...], or choose with --only {key}=...")
    return Problem(axis_place, f"{key} is an axis and also stands at the top level, at {place}", "keep one")


def _too_many(source: Source, axes: Mapping[str, Any]) -> list[Problem]:
    # Counted, never built: a file can ask for more cells than memory holds.
    count = math.prod(len(values) for values in axes.values() if isinstance(values, list))
    included = source.values.get("include")
    count += len(included) if isinstance(included, list) else 0
    if count <= MAX_CELLS:
        return []
    return [Problem(source.where(("axes",), key=True), f"{count} cells, and a matrix may have {MAX_CELLS}", "shorten an axis")]


def _incomplete(source: Source, owner: Mapping[str, str]) -> list[Problem]:
    found = []
    included = source.values.get("include")
    included = included if isinstance(included, list) else []
    if owner or not included:
        missing = [key for key in NEEDED if key not in source.values and key not in owner]
        if missing:
            hint = "give it at the top level or as an axis" if len(missing) == 1 else "give them at the top level or as axes"
            found.append(Problem(source.where(()), f"every cell needs {', '.join(missing)}", hint))
    for index, point in enumerate(included):
        if not isinstance(point, dict):
            continue
        missing = [key for key in dict.fromkeys([*NEEDED, *owner]) if key not in source.values and key not in point]
        if missing:
            message = f"an included point needs {', '.join(missing)}: the top level does not say"
            found.append(Problem(source.where(("include", index)), message))
    return found


def data_there(data: DataSpec, source: Source) -> list[Problem]:
    """A dataset or tokenizer that is not there, said before ranks are started to find it out."""
    found = []
    if data.path is not None and not (Path(data.path) / "meta" / "info.json").is_file():
        missing = "there is no meta/info.json in it" if Path(data.path).is_dir() else "there is no such folder"
        found.append(Problem(source.where(("data", "lerobot")), f"{data.path} is not a LeRobot dataset: {missing}"))
    file = data.tokenizer_file
    if file is not None and not file.is_file():
        missing = "there is no tokenizer.json in it" if Path(data.tokenizer).is_dir() else "there is no such file"
        hint = "name a tokenizer.json or its folder"
        found.append(Problem(source.where(("data", "tokenizer")), f"{data.tokenizer} is not a tokenizer: {missing}", hint))
    return found


def weights_there(weights: str | None, where: str) -> list[Problem]:
    """Weights that cannot be read, said likewise."""
    if weights is None:
        return []
    try:
        weight_files(Path(weights))
    except DataError as error:
        return [Problem(where, f"weights: {error}", "name a safetensors file, or a folder of them")]
    return []


def meaning(matrix: Matrix, source: Source, policies: Mapping[str, PolicyEntry]) -> list[Problem]:
    """Problems that only the cells show: sizes that a policy lacks, and selections that select nothing."""
    cells = list(matrix.cells())
    if not cells:
        return [Problem(source.where(("exclude",), key=True), "every cell is excluded")]
    found = data_there(matrix.data, source)
    for weights in dict.fromkeys(cell.weights for cell in cells):
        found += weights_there(weights, _where_given(source, "weights", weights))
    for policy, size in dict.fromkeys((cell.policy, cell.size) for cell in cells):
        presets = policies[policy].presets
        if size not in presets:
            where = _where_given(source, "size", size)
            found.append(Problem(where, f"policy {policy} has no size {size!r}", did_you_mean(size, presets)))
    selections: list[tuple[Keys, Mapping[str, Any]]] = [(("reference",), matrix.reference)]
    selections += [(("thresholds", i, "where"), threshold.where) for i, threshold in enumerate(matrix.thresholds)]
    for keys, point in selections:
        if not any(matches(cell, point) for cell in cells):
            found.append(Problem(source.where(keys), f"no cell has {describe(point)}", _nearest(point, cells)))
    return found


def _nearest(point: Mapping[str, Any], cells: list[Cell]) -> str:
    """Which values there are, of the first field that rules every cell out by itself."""
    for key, value in point.items():
        present = dict.fromkeys(getattr(cell, key) for cell in cells)
        if value not in present:
            return f"{key} is one of {', '.join(map(word, present))}"
    return "these values never come together"


def _where_given(source: Source, field: str, value: Any) -> str:
    """Where a field gets this value: at the top level, in an axis, or in an included point."""
    leads = [keys for keys in source.places if keys and (keys[-1] == field or keys[:-1] == ("axes", field))]
    return next((source.where(keys) for keys in leads if source.at(keys) == value), source.where(()))
