"""Launches of a cell, added one at a time: their records without the times of steps, and what those times show.

Times are most of a record, and a few numbers are all that reports, gates and comparisons need of them. Kept are those, so that
ten thousand launches take little memory, however many steps each has.
"""

from __future__ import annotations

import math
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

    ranks: int
    phases: tuple[str, ...]
    straggler: Straggler | None
    # In one array, since there is one for every launch: `mean_step_s`, `median_step_s`, those of the phases and of the split.
    seconds: Sequence[float]

    @property
    def mean_step_s(self) -> float:
        """Mean step of the slowest rank."""
        return self.seconds[0]

    @property
    def median_step_s(self) -> Sequence[float]:
        """Median step of each rank."""
        return self.seconds[1 : 1 + self.ranks]

    @property
    def has_split(self) -> bool:
        """Return whether the parts of steps are known."""
        return len(self.seconds) > 1 + self.ranks + len(self.phases)

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase in a mean step of the slowest rank."""
        start = 1 + self.ranks
        return dict(zip(self.phases, self.seconds[start : start + len(self.phases)], strict=True))

    def split(self) -> dict[str, Sequence[float]]:
        """Return the seconds of each part of a mean step on every rank; empty where it is unknown."""
        if not self.has_split:
            return {}
        start = 1 + self.ranks + len(self.phases)
        return {
            part: self.seconds[start + index * self.ranks : start + (index + 1) * self.ranks]
            for index, part in enumerate(STEP_PARTS)
        }


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
    busy: dict[int, tuple[str, ...]] = field(default_factory=dict)  # why the hosts of a launch were busy, if they were
    host: HostState | None = None
    _has_ok: bool = False
    _shared: Mapping[str, Any] | None = None  # the first record
    # As `records`, one of each launch.
    _numbers: dict[str, array[float]] = field(default_factory=dict)  # metric -> value; NaN where unknown, or the launch not ok
    _words: list[Mapping[str, str]] = field(default_factory=list)  # metric -> value; launches that agree have the same object
    _times: list[LaunchTimes | None] = field(default_factory=list)

    def add(self, record: LaunchRecord) -> None:
        """Add a launch."""
        is_ok = record["status"] == "ok"
        self._add_numbers(record, is_ok)
        words = {metric.name: str(metric.read(record)) for metric in metrics().values() if not metric.is_number}
        self._words.append(self._words[-1] if self._words and self._words[-1] == words else words)
        times = record["step_time_s"]
        self._times.append(None if times is None else _summarize_times(record, times, self._times[-1] if self._times else None))
        if reasons := busy_reasons(record):
            self.busy[record["launch"]] = reasons
        if is_ok or (record["observed"] and not self._has_ok):
            self.host = record.get("host")
        self._has_ok = self._has_ok or is_ok
        self.records.append(cast("LaunchRecord", self._without_times(record)))

    def numbers(self, metric: str) -> dict[int, float]:
        """Return the values of a metric by number of the launch, of launches that ended ok and know it."""
        values = zip(self.records, self._numbers.get(metric, ()), strict=False)
        return {record["launch"]: value for record, value in values if not math.isnan(value)}

    def words(self, metric: str) -> dict[int, str]:
        """Return the values of a metric that is a word by number of the launch."""
        return {record["launch"]: words[metric] for record, words in zip(self.records, self._words, strict=True)}

    def times(self) -> dict[int, LaunchTimes]:
        """Return the times of launches that measured any by number of the launch."""
        pairs = zip(self.records, self._times, strict=True)
        return {record["launch"]: times for record, times in pairs if times is not None}

    def _add_numbers(self, record: LaunchRecord, is_ok: bool) -> None:
        for metric in metrics().values():
            if is_ok and metric.is_number and (value := metric.read(record)) is not None:
                values = self._numbers.setdefault(metric.name, array("d"))
                values.extend([math.nan] * (len(self.records) - len(values)))
                values.append(float(value))

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


def _summarize_times(record: LaunchRecord, times: StepTime, previous: LaunchTimes | None) -> LaunchTimes:
    """Return the times of a launch, whose names of phases are the same object as those of `previous` where they are equal."""
    totals = [sum(steps) for steps in times["per_rank"]]
    slowest = totals.index(max(totals))
    phases, split = record["phases_s"] or {}, record.get("step_split_s") or {}
    has_split, names = set(split) >= set(STEP_PARTS), tuple(phases)
    seconds = [
        fmean(times["per_rank"][slowest]),
        *(median(steps) for steps in times["per_rank"]),
        *(fmean(phase["per_rank"][slowest]) for phase in phases.values()),
        *(fmean(steps) for part in STEP_PARTS if has_split for steps in split[part]["per_rank"]),
    ]
    return LaunchTimes(
        ranks=len(totals),
        phases=previous.phases if previous is not None and previous.phases == names else names,
        straggler=find_straggler(split) if has_split else None,
        seconds=array("d", seconds),
    )
