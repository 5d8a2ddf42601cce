"""Launches of a cell, added one at a time: their records without the times of steps, and what those times show.

Times are most of a record, and a few numbers are all that reports, gates and comparisons need of them. Kept are those, so that
ten thousand launches take little memory, however many steps each has.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, cast

from benchbox.analysis.stragglers import find_straggler
from benchbox.registry.host_load import busy_reasons
from benchbox.registry.metrics import metrics
from benchbox.registry.phases import STEP_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.analysis.stragglers import Straggler
    from benchbox.registry.launch_record import HostState, LaunchRecord, StepTime
    from benchbox.store.run import Run


_LEFT_OUT = frozenset({"step_time_s", "phases_s", "step_split_s", "throughput", "host"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimes:
    """Seconds of a launch in its measured steps."""

    median_step_s: Sequence[float]  # of each rank
    mean_step_s: float  # of the slowest rank
    phases: tuple[str, ...]
    phases_s: Sequence[float]  # of each phase in a mean step of the slowest rank
    split_s: Sequence[float]  # of each part (`STEP_PARTS`) in a mean step, on every rank in turn; empty where it is unknown
    straggler: Straggler | None

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase in a mean step of the slowest rank."""
        return dict(zip(self.phases, self.phases_s, strict=True))

    def split(self) -> dict[str, Sequence[float]]:
        """Return the seconds of each part of a mean step on every rank; empty where it is unknown."""
        ranks = len(self.split_s) // len(STEP_PARTS)
        if not ranks:
            return {}
        return {part: self.split_s[start * ranks : (start + 1) * ranks] for start, part in enumerate(STEP_PARTS)}


class _SharedRecord(Mapping[str, Any]):
    """Record that has most of its values from another one: launches of a cell differ in a few."""

    __slots__ = ("_own", "_shared")

    def __init__(self, own: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
        self._own, self._shared = own, shared

    def __getitem__(self, key: str) -> Any:
        return self._own[key] if key in self._own else self._shared[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shared)

    def __len__(self) -> int:
        return len(self._shared)


@dataclass(slots=True)
class CellLaunches:
    """Launches of one cell. Metrics are read from whole records, before their times are left out.

    Of the states of hosts, only that of the launch that shows what ran is kept: of the latest that ended ok, else of the latest
    that observed anything, as `CellSummary.evidence`.
    """

    records: list[LaunchRecord] = field(default_factory=list)
    numbers: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))  # metric -> launch that ended ok
    words: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))  # metric -> launch
    times: dict[int, LaunchTimes] = field(default_factory=dict)  # of launches that measured any
    busy: dict[int, tuple[str, ...]] = field(default_factory=dict)  # why the hosts of a launch were busy, if they were
    host: HostState | None = None
    _has_ok: bool = False
    _shared: Mapping[str, Any] | None = None  # the first record

    def add(self, record: LaunchRecord) -> None:
        """Add a launch."""
        number, is_ok = record["launch"], record["status"] == "ok"
        for metric in metrics().values():
            if not metric.is_number:
                self.words[metric.name][number] = sys.intern(str(metric.read(record)))
            elif is_ok and (value := metric.read(record)) is not None:
                self.numbers[metric.name][number] = float(value)
        if (times := record["step_time_s"]) is not None:
            self.times[number] = _summarize_times(record, times)
        if reasons := busy_reasons(record):
            self.busy[number] = reasons
        if is_ok or (record["observed"] and not self._has_ok):
            self.host = record.get("host")
        self._has_ok = self._has_ok or is_ok
        self.records.append(cast("LaunchRecord", self._without_times(record)))

    def _without_times(self, record: LaunchRecord) -> Mapping[str, Any]:
        values = {key: value for key, value in record.items() if key not in _LEFT_OUT}
        if self._shared is None:
            self._shared = values
        if self._shared.keys() != values.keys():
            return values
        return _SharedRecord({key: value for key, value in values.items() if value is not self._shared[key]}, self._shared)


class RunLaunches:
    """Launches of a run by cell, added one at a time. Those beyond the current look are left out.

    They wait for the next look: judging them earlier would be a look of its own.
    """

    def __init__(self, run: Run) -> None:
        self.by_cell: dict[str, CellLaunches] = defaultdict(CellLaunches)
        self._planned = None if run.sequential is None else run.planned_launches()

    def add(self, record: LaunchRecord) -> None:
        """Add a launch to its cell."""
        if self._planned is None or record["launch"] <= self._planned.get(record["cell_id"], 0):
            self.by_cell[record["cell_id"]].add(record)


def _summarize_times(record: LaunchRecord, times: StepTime) -> LaunchTimes:
    totals = [sum(steps) for steps in times["per_rank"]]
    slowest = totals.index(max(totals))
    phases, split = record["phases_s"] or {}, record.get("step_split_s") or {}
    has_split = set(split) >= set(STEP_PARTS)
    return LaunchTimes(
        median_step_s=array("d", [median(steps) for steps in times["per_rank"]]),
        mean_step_s=fmean(times["per_rank"][slowest]),
        phases=tuple(phases),
        phases_s=array("d", [fmean(phase["per_rank"][slowest]) for phase in phases.values()]),
        split_s=array("d", [fmean(steps) for part in STEP_PARTS if has_split for steps in split[part]["per_rank"]]),
        straggler=find_straggler(split) if has_split else None,
    )
