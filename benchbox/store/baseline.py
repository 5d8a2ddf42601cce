"""Baselines: the metric values of a complete run on one machine, committed to be compared with."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from benchbox.errors import RecordError
from benchbox.registry.launch_environment import LaunchEnvironment  # noqa: TC001 (types are read at run time)
from benchbox.store.files import read_json, write_json
from benchbox.store.json_types import type_problem
from benchbox.store.record import SCHEMA_VERSION, check_keys, check_version

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LAUNCH = re.compile(r"[1-9][0-9]{0,8}")


class _Value(TypedDict):
    value: float
    low: float
    high: float
    launches: int
    by_launch: NotRequired[dict[str, float]]  # value by number of the launch


class _BaselineWalk(TypedDict):
    at_most: int | None  # the largest batch that it might try


class _BaselineCell(TypedDict):
    cell: dict[str, Any]
    values: dict[str, _Value | None]
    walk: NotRequired[_BaselineWalk | None]  # that has tried it; null: none


class _BaselineFile(TypedDict, total=False):
    machine: str
    matrix: str
    promoted_at: str
    benchbox_version: str
    measure: dict[str, Any]
    environment: LaunchEnvironment
    environments: dict[str, LaunchEnvironment]
    cells: dict[str, _BaselineCell]
    started_at: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Metric values of a run.

    `cells` maps a cell id to its `cell`, `values`: metric -> {value, low, high, launches, by_launch}, and of a
    batch of a walk the `walk`. `environments` are those of cells with so many ranks, as text: threads depend on it. Baselines
    of earlier versions lack them, `walk`, `by_launch` and `started_at`: when launches started.
    """

    machine: str
    matrix: str
    promoted_at: str  # ISO 8601, UTC
    benchbox_version: str
    measure: Mapping[str, Any]
    environment: Mapping[str, Any]
    cells: Mapping[str, Mapping[str, Any]]
    started_at: tuple[str, ...] = ()
    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def environment_by_ranks(self) -> dict[int, Mapping[str, Any]]:
        """The environments by number of ranks; that of an earlier version is of its last cell."""
        if self.environments:
            return {int(ranks): environment for ranks, environment in self.environments.items()}
        ranks = [entry["cell"].get("world_size", 1) for entry in self.cells.values()]
        return {ranks[-1] if ranks else 1: self.environment}

    def by_launch(self, cell_id: str, metric: str) -> dict[int, float]:
        """Return the values of a metric by number of the launch; empty when the baseline does not have them."""
        entry = (self.cells.get(cell_id) or {}).get("values", {}).get(metric) or {}
        return {int(number): float(value) for number, value in entry.get("by_launch", {}).items()}

    def is_of_walk(self, cell_id: str) -> bool | None:
        """Return whether a cell is a batch of a walk, whose first launch searched; None: an older baseline does not say."""
        entry = self.cells.get(cell_id) or {}
        return entry["walk"] is not None if "walk" in entry else None

    def at_most(self, cell_id: str) -> int | None:
        """Return the largest batch that the walk of a cell might try; None without a walk or a limit."""
        walk = (self.cells.get(cell_id) or {}).get("walk")
        return walk["at_most"] if walk else None

    def value(self, cell_id: str, metric: str) -> float | None:
        """Return a metric of a cell, None when the baseline does not have it."""
        entry = (self.cells.get(cell_id) or {}).get("values", {}).get(metric)
        return None if entry is None else float(entry["value"])


def baseline_path(folder: Path, machine: str, matrix: str) -> Path:
    """Return `<folder>/<machine>/<matrix>.json`."""
    return folder / machine / f"{matrix}.json"


def write_baseline(path: Path, baseline: Baseline) -> None:
    write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(baseline)})


def read_baseline(path: Path) -> Baseline:
    """Read a baseline from its file.

    Raises:
        RecordError: it cannot be read, or is not a baseline.
    """
    values = read_json(path, "`benchbox baseline promote` writes a baseline")
    check_version(values, str(path))
    check_keys(values, ("schema_version", *Baseline.__slots__), str(path))
    del values["schema_version"]
    problem = type_problem(values, _BaselineFile) or _launch_problem(values.get("cells", {}))
    if problem:
        raise RecordError(f"{path}: not a baseline ({problem})")
    try:
        return Baseline(**values | {"started_at": tuple(values.get("started_at", ()))})
    except TypeError as error:
        raise RecordError(f"{path}: not a baseline ({error})") from None


def _launch_problem(cells: Mapping[str, _BaselineCell]) -> str | None:
    """Return which key of a metric's launches is no number of a launch, or None."""
    for cell_id, cell in cells.items():
        for metric, value in cell["values"].items():
            for number in value.get("by_launch", {}) if value else ():
                if not _LAUNCH.fullmatch(number):
                    return f"cells.{cell_id}.values.{metric}.by_launch.{number}: no number of a launch"
    return None
