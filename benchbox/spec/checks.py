"""Checks across fields: keys that exclude one another, incomplete points, missing files, selections that select nothing."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any

from benchbox.errors import Problem
from benchbox.registry.adapted_names import data_refusal, name_refusal
from benchbox.registry.attention import attention_refusal
from benchbox.registry.modes import mode_refusal
from benchbox.registry.names import did_you_mean
from benchbox.spec.cell import LIMITED_STEPS, Cell, MeasureSpec
from benchbox.spec.fields import Point
from benchbox.spec.matrix import describe, matches, to_yaml_word
from benchbox.spec.threshold import FASTEST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.registry.policies import PolicyEntry
    from benchbox.spec.cell import DataSpec
    from benchbox.spec.matrix import Matrix
    from benchbox.spec.source import Keys, Source

MAX_CELLS = 100_000
REQUIRED = [f.name for f in fields(Cell) if f.default is MISSING and f.default_factory is MISSING]


def check_structure(source: Source) -> list[Problem]:
    """Return the problems between keys. It reads the plain values and skips those of a wrong type, which pydantic reports."""
    problems: list[Problem] = []
    axes = source.values.get("axes", {})
    readable = isinstance(axes, dict)
    axes = axes if isinstance(axes, dict) else {}
    owner: dict[str, str] = {}  # field -> the axis that varies it
    for name, values in axes.items():
        points = [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
        keys = [name] if name in Point.model_fields else list(points[0]) if points else []
        readable = readable and bool(keys)
        for key in keys:
            where = source.where(("axes", name), key=True)
            if key in source.values:
                problems.append(_duplicate_field(key, source, where))
            if key in owner:
                problems.append(Problem(where, f"axis {name} varies {key}, which axis {owner[key]} varies already"))
            owner.setdefault(key, name)
        for index, point in enumerate(points):
            if not point:
                problems.append(Problem(source.where(("axes", name, index)), f"this point of axis {name} is empty"))
            elif point.keys() != points[0].keys():
                message = f"every point of axis {name} needs the same keys: {', '.join(points[0])}"
                differences = {"lacks": points[0].keys() - point.keys(), "also has": point.keys() - points[0].keys()}
                texts = [f"{verb} {', '.join(sorted(map(str, keys)))}" for verb, keys in differences.items() if keys]
                problems.append(Problem(source.where(("axes", name, index)), message, f"this one {' and '.join(texts)}"))
    problems += _check_cell_count(source, axes)
    if isinstance(axes.get("batch"), dict):
        problems += _check_search(source)
    if readable:  # a misspelt axis would be reported again as a missing field
        problems += _check_completeness(source, owner)
    return problems


def _check_search(source: Source) -> list[Problem]:
    """Return the problems of other keys with a search along the axis batch."""
    problems = []
    excluded = source.values.get("exclude")
    for index, point in enumerate(excluded if isinstance(excluded, list) else []):
        if isinstance(point, dict) and "batch" in point:
            where = source.where(("exclude", index, "batch"), key=True)
            problems.append(Problem(where, "batch is searched, so none can be excluded", "give at_most along the axis"))
    defaults = MeasureSpec()
    steps = [source.at(("measure", key), getattr(defaults, key)) for key in ("warmup_steps", "steps")]
    if all(type(count) is int for count in steps) and sum(steps) < LIMITED_STEPS:
        where = source.where(("measure",), key=True)
        message = f"a search takes at least {LIMITED_STEPS} steps of every launch, and measure has {sum(steps)}"
        problems.append(Problem(where, message, "the second step is the first with the state of the optimizer"))
    frozen = source.at(("optim", "freeze_backbone_steps"), 0)
    if type(frozen) is int and frozen > 0 and type(steps[0]) is int and steps[0] < frozen + LIMITED_STEPS:
        where = source.where(("optim", "freeze_backbone_steps"), key=True)
        message = (
            f"a search needs {LIMITED_STEPS} warm-up steps after the backbone is thawed, and measure has {steps[0]} in all"
        )
        problems.append(Problem(where, message, "steps with a frozen backbone take less memory than those of training"))
    return problems


def _duplicate_field(key: str, source: Source, axis_position: str) -> Problem:
    position = source.where((key,), key=True)
    if position.startswith("--set"):
        return Problem(
            position, f"{key} is an axis, at {axis_position}", f"set axes.{key}=[...], or choose with --only {key}=..."
        )
    return Problem(axis_position, f"{key} is an axis and also stands at the top level, at {position}", "keep one")


def _check_cell_count(source: Source, axes: Mapping[str, Any]) -> list[Problem]:
    # Cells are counted and not built: a file can ask for more of them than fit into memory.
    count = math.prod(len(values) for values in axes.values() if isinstance(values, list))
    included = source.values.get("include")
    count += len(included) if isinstance(included, list) else 0
    if count <= MAX_CELLS:
        return []
    return [Problem(source.where(("axes",), key=True), f"{count} cells, and a matrix may have {MAX_CELLS}", "shorten an axis")]


def _check_completeness(source: Source, owner: Mapping[str, str]) -> list[Problem]:
    problems = []
    included = source.values.get("include")
    included = included if isinstance(included, list) else []
    if owner or not included:
        missing = [key for key in REQUIRED if key not in source.values and key not in owner]
        if missing:
            hint = "give it at the top level or as an axis" if len(missing) == 1 else "give them at the top level or as axes"
            problems.append(Problem(source.where(()), f"every cell needs {', '.join(missing)}", hint))
    for index, point in enumerate(included):
        if not isinstance(point, dict):
            continue
        missing = [key for key in dict.fromkeys([*REQUIRED, *owner]) if key not in source.values and key not in point]
        if missing:
            message = f"an included point needs {', '.join(missing)}: the top level does not say"
            problems.append(Problem(source.where(("include", index)), message))
    return problems


def check_cells(matrix: Matrix, source: Source, policies: Mapping[str, PolicyEntry]) -> list[Problem]:
    """Return the problems that only the cells show: sizes that a policy lacks, and selections that select nothing."""
    cells = list(matrix.cells())
    if not cells:
        return [Problem(source.where(("exclude",), key=True), "every cell is excluded")]
    return [*check_policies(cells, matrix.data, source, policies), *_check_selections(cells, matrix, source)]


def check_policies(cells: Sequence[Cell], data: DataSpec, source: Source, policies: Mapping[str, PolicyEntry]) -> list[Problem]:
    """Return the problems of sizes, data, attention kernels and modes that policies of these cells do not have."""
    problems = []
    for policy, size in dict.fromkeys((cell.policy, cell.size) for cell in cells):
        presets = policies[policy].presets
        if size not in presets:
            where = _position_of(source, "size", size, policy)
            problems.append(Problem(where, f"policy {policy} has no size {size!r}", did_you_mean(size, presets)))
        elif refusal := name_refusal(policies[policy], size):
            problems.append(Problem(_position_of(source, "policy", policy), *refusal))
        elif refusal := data_refusal(policies[policy], size, data.kind):
            problems.append(Problem(source.where(("data",)), *refusal))
    for policy, attention in dict.fromkeys((cell.policy, cell.attention) for cell in cells):
        if refusal := attention_refusal(policies[policy], attention):
            problems.append(Problem(_position_of(source, "attention", attention, policy), *refusal))
    refusals = (mode_refusal(policies[policy], data.mode) for policy in dict.fromkeys(cell.policy for cell in cells))
    return [*problems, *(Problem(source.where(("data", "mode")), *refusal) for refusal in refusals if refusal)]


def _check_selections(cells: list[Cell], matrix: Matrix, source: Source) -> list[Problem]:
    """Return the problems of `reference`, `exclude` and thresholds that select no cell."""
    problems = []
    selections: list[tuple[Keys, Mapping[str, Any], list[Cell]]] = [(("reference",), matrix.reference, cells)]
    for index, threshold in enumerate(matrix.thresholds):
        keys: Keys = ("thresholds", index, "where")
        if threshold.where.get("batch") != FASTEST:
            selections.append((keys, threshold.where, cells))
        elif matrix.search is not None:
            others = {key: value for key, value in threshold.where.items() if key != "batch"}
            selections.append((keys, others, list(matrix.axis_cells())))
        elif not any(source.where(path).startswith("--set") for path in (("axes", "batch"), ("batch",))):
            # Without --set batch=.. the matrix could never be judged. With it, `check` says that the run has no walks.
            where, hint = source.where((*keys, "batch")), "under axes, write batch: {search: max}"
            problems.append(Problem(where, f"batch: {FASTEST} selects walks, and this matrix has none", hint))
    every_cell = list(replace(matrix, exclude=()).axis_cells())
    for index, point in enumerate(matrix.exclude):
        # --set may leave out what a matrix excludes.
        if not any(source.where(path).startswith("--set") for key in point for path in (("axes", key), (key,))):
            selections.append((("exclude", index), point, every_cell))
    for keys, point, selectable in selections:
        if not any(matches(cell, point) for cell in selectable):
            hint = _existing_values(point, selectable)
            problems.append(Problem(source.where(keys), f"no cell has {describe(point)}", hint))
    return problems


def _existing_values(point: Mapping[str, Any], cells: list[Cell]) -> str:
    """Return a hint: the values that cells have of the first field that by itself excludes all of them."""
    for key, value in point.items():
        values = dict.fromkeys(getattr(cell, key) for cell in cells)
        if value not in values:
            return f"{key} is one of {', '.join(map(to_yaml_word, values))}"
    return "these values never come together"


def _position_of(source: Source, field: str, value: Any, policy: str | None = None) -> str:
    """Return where a field is set to this value: at the top level, in an axis, or in an included point.

    A point that also sets the policy, to this one, comes first.
    """
    paths = [
        keys
        for keys in source.positions
        if keys[:1] in ((field,), ("axes",), ("include",)) and (keys[-1] == field or keys[:-1] == ("axes", field))
    ]
    positions = [keys for keys in paths if source.at(keys) == value]
    points = ((keys, source.at(keys[:-1])) for keys in positions)
    of_policy = [keys for keys, point in points if policy and isinstance(point, dict) and point.get("policy") == policy]
    return source.where(next(iter([*of_policy, *positions]), ()))
