"""One summary per cell, made from its launch records. The launch is the sample: steps are never pooled across launches."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

from benchbox.analysis.equivalence import judge_equivalence
from benchbox.analysis.launches import CellLaunches, RunLaunches
from benchbox.analysis.partial_steps import partial_steps
from benchbox.registry.metrics import Metric, metrics
from benchbox.registry.phases import PHASES
from benchbox.registry.statuses import DIVERGED, STATUSES

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Mapping

    from benchbox.analysis.equivalence import Equivalence
    from benchbox.analysis.launches import LaunchTimes
    from benchbox.registry.launch_record import CellDict, ErrorRecord, LaunchRecord, ObservedRecord, Precision
    from benchbox.store.run import Run

_T = TypeVar("_T")

MISSING = "missing"

ONE_LAUNCH, HIGH_SPREAD, BUSY_HOST = "one launch", "high spread", "busy host"
RECOMPILED, PARTLY_COMPILED, PARTIAL_STEPS = "recompiled", "partly compiled", "partial steps"
# Beyond it, launches cannot show the differences that a comparison is about.
MAX_SPREAD = 0.10


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over launches: the figure to quote (their median, or the worst for a peak), and its range."""

    value: float
    low: float
    high: float
    launches: int


@dataclass(frozen=True, kw_only=True)  # without slots, which have no room for what is computed once
class CellSummary:
    """One cell over its launches. Metrics come from the launches that ended ok, and are None when there is none.

    Records have no times of steps, phases and parts, no throughput and no states of hosts: see `launches`.
    """

    cell_id: str
    cell: CellDict
    planned: int  # launches
    records: tuple[LaunchRecord, ...]
    status: str  # the worst over launches, "missing" when none ran, or "diverged" when they trained unlike the reference
    values: Mapping[str, Spread | None]  # by metric
    launches: CellLaunches  # all of them; `records` may be a part
    equivalence: Equivalence | None = None  # how it trains beside the other cells; None before that is judged
    beyond_memory: bool = False  # a batch of a walk that is known not to fit, beside one that does: no failure

    @cached_property
    def ok(self) -> tuple[LaunchRecord, ...]:
        return tuple(record for record in self.records if record["status"] == "ok")

    @property
    def error(self) -> ErrorRecord | None:
        """The error of the worst launch."""
        return next((record["error"] for record in self.records if record["status"] == self.status), None)

    @property
    def divergence(self) -> str | None:
        """The difference from the reference that made the cell diverged, in words."""
        return self.equivalence.reason if self.status == DIVERGED and self.equivalence else None

    @property
    def complete(self) -> bool:
        """Return whether every planned launch ran and ended as it should: ok, or beyond memory at the end of a walk."""
        return self.beyond_memory or (self.status == "ok" and len(self.ok) >= self.planned)

    @cached_property
    def evidence(self) -> LaunchRecord | None:
        """The record that shows what ran: that of the latest ok launch, else of the latest that observed anything."""
        observed = [record for record in self.records if record["observed"]]
        return next(iter([*reversed(self.ok), *reversed(observed)]), None)

    @property
    def observed(self) -> ObservedRecord | None:
        """Observations in `evidence`."""
        return self.evidence["observed"] if self.evidence else None

    @property
    def precision(self) -> Precision | None:
        """Result of the precision audit in `evidence`."""
        return self.evidence["precision"] if self.evidence else None

    @property
    def peak_bytes(self) -> float | None:
        """Return the highest peak of a rank: of reserved memory where it is known, else of allocated."""
        peaks = [self.values.get(name) for name in ("peak_reserved_bytes", "peak_allocated_bytes")]
        return next((peak.value for peak in peaks if peak is not None), None)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return why the figures deserve less trust: launches, a busy host, compilation, steps that were not whole."""
        step = self.values.get("step_time_s")
        marks = {
            ONE_LAUNCH: self.complete and len(self.ok) == 1,
            HIGH_SPREAD: step is not None and step.high - step.low > MAX_SPREAD * step.value,
            BUSY_HOST: bool(self.busy_reasons),
            RECOMPILED: any(compiled_in_measured_steps(record) for record in self.ok),
            PARTLY_COMPILED: any(ran_partly_uncompiled(record) for record in self.ok),
            PARTIAL_STEPS: any(partial_steps(record) for record in self.ok),
        }
        return tuple(mark for mark, applies in marks.items() if applies)

    @property
    def busy_reasons(self) -> dict[int, tuple[str, ...]]:
        """Return why the hosts of launches that ended ok were busy, by number of the launch."""
        return self._of_ok(self.launches.busy)

    def of_launches(self, numbers: Container[int]) -> CellSummary:
        """Return a summary of some launches: their records, figures and status. It trains as all of them do."""
        records = tuple(record for record in self.records if record["launch"] in numbers)
        planned = sum(number in numbers for number in range(1, self.planned + 1))
        part = replace(self, records=records, planned=planned)
        values = {name: spread_of(metric, part.by_launch(metric).values()) for name, metric in _numeric_metrics().items()}
        return replace(part, values=values, status=DIVERGED if self.status == DIVERGED else _worst_status(records))

    def words(self, metric: Metric, records: Iterable[LaunchRecord]) -> str:
        """Return the values of a metric that is a word in some of the records, sorted, each once; empty without records."""
        words = self.launches.words(metric.name)
        return ", ".join(sorted({words[record["launch"]] for record in records}))

    def by_launch(self, metric: Metric) -> dict[int, float]:
        """Return the values of a numeric metric by number of the launch, of launches that ended ok and know it."""
        return self._of_ok(self.launches.numbers(metric.name))

    @cached_property
    def times(self) -> dict[int, LaunchTimes]:
        """Times of the launches that ended ok, by number of the launch."""
        return self._of_ok(self.launches.times())

    def _of_ok(self, values: Mapping[int, _T]) -> dict[int, _T]:
        """Return the values of the launches that ended ok, of those that have one."""
        return {record["launch"]: values[record["launch"]] for record in self.ok if record["launch"] in values}

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase in a mean step of the slowest rank, mean over launches, in the order of the step.

        Means, not medians: they add up to the mean step (`mean_step_s`).
        """
        seconds: dict[str, list[float]] = defaultdict(list)  # phase -> [launch]
        for times in self.times.values():
            for phase, value in times.phase_seconds().items():
                seconds[phase].append(value)
        order = [phase for phase in PHASES if phase in seconds]
        order += [phase for phase in seconds if phase not in PHASES]
        return {phase: fmean(seconds[phase]) for phase in order}

    def mean_step_s(self) -> float | None:
        """Return the mean step of the slowest rank, mean over launches: the sum of the phases."""
        means = [times.mean_step_s for times in self.times.values()]
        return fmean(means) if means else None


def summarize(run: Run, records: Iterable[LaunchRecord]) -> list[CellSummary]:
    """Return one summary for every planned cell, in the order of the plan; a cell without records is `missing`.

    Args:
        records: read one at a time, and not kept as they are: see `CellLaunches`.
    """
    launches = RunLaunches(run)
    for record in records:
        launches.add(record)
    return summarize_launches(run, launches)


def summarize_launches(run: Run, launches: RunLaunches) -> list[CellSummary]:
    """Return what `summarize` returns for the records of launches that were added one at a time."""
    planned, by_cell = run.planned_launches(), launches.by_cell
    beyond = _beyond_memory(run, by_cell)
    summaries = [
        _summary(cell_id, cell, planned[cell_id], by_cell.get(cell_id) or CellLaunches(), cell_id in beyond)
        for cell_id, cell in run.cells.items()
    ]
    judged = judge_equivalence(summaries, run.reference)
    return [_with_equivalence(summary, judged[summary.cell_id]) for summary in summaries]


def _with_equivalence(summary: CellSummary, equivalence: Equivalence) -> CellSummary:
    is_diverged = summary.status == "ok" and equivalence.verdict == "diverged"
    return replace(summary, equivalence=equivalence, status=DIVERGED if is_diverged else summary.status)


def machine_of(summaries: Iterable[CellSummary]) -> str | None:
    """Return the machine of all launches that know theirs, if that is one."""
    environments = [record["environment"] or {} for summary in summaries for record in summary.records]
    machines = {machine for environment in environments if (machine := environment.get("machine")) is not None}
    return machines.pop() if len(machines) == 1 else None


def compiled_in_measured_steps(record: LaunchRecord) -> bool:
    """Return whether a rank compiled something in a measured step."""
    compilation = record.get("compilation")
    return bool(compilation and any(rank["in_measured_steps"] for rank in compilation["per_rank"]))


def ran_partly_uncompiled(record: LaunchRecord) -> bool:
    """Return whether a rank ran code uncompiled that torch.compile gave up, or of which it had compiled too many variants."""
    compilation = record.get("compilation")
    return bool(compilation and any(rank.get("limits_reached") or rank.get("uncompiled") for rank in compilation["per_rank"]))


def _beyond_memory(run: Run, launches: Mapping[str, CellLaunches]) -> set[str]:
    """Return the ids of the cells that ran out of memory in a walk in which a smaller batch fits.

    A batch above one that ran out of memory need not run: a walk whose start is known not to fit by others begins below it.
    """
    beyond: set[str] = set()
    for walk in run.walks:
        ran = {cell_id: launches[cell_id].records if cell_id in launches else () for cell_id in walk["cells"]}
        statuses = {cell_id: {record["status"] for record in records} for cell_id, records in ran.items()}
        fits = [run.cells[cell_id]["batch"] for cell_id, names in statuses.items() if "ok" in names]
        fails = [run.cells[cell_id]["batch"] for cell_id, names in statuses.items() if names == {"oom"}]
        if fits and fails:
            beyond |= {
                cell_id
                for cell_id, names in statuses.items()
                if names <= {"oom"} and run.cells[cell_id]["batch"] >= max(min(fails), max(fits) + 1)
            }
    return beyond


def _summary(cell_id: str, cell: CellDict, planned: int, launches: CellLaunches, beyond_memory: bool) -> CellSummary:
    return CellSummary(
        cell_id=cell_id,
        cell=cell,
        planned=planned,
        records=tuple(launches.records),
        status=_worst_status(launches.records),
        values={name: spread_of(metric, launches.numbers(name).values()) for name, metric in _numeric_metrics().items()},
        launches=launches,
        beyond_memory=beyond_memory,
    )


def _worst_status(records: Iterable[LaunchRecord]) -> str:
    return max((record["status"] for record in records), key=STATUSES.index, default=MISSING)


def _numeric_metrics() -> dict[str, Metric]:
    return {name: metric for name, metric in metrics().items() if metric.is_number}


def spread_of(metric: Metric, values: Collection[float]) -> Spread | None:
    """Return a numeric metric over launches, or None when it is unknown in all of them."""
    if not values:
        return None
    value = median(values)
    if metric.launches == "worst":
        value = min(values) if metric.direction == "higher" else max(values)
    return Spread(value, min(values), max(values), len(values))


def varying_fields(cells: Iterable[CellDict]) -> tuple[str, ...]:
    """Return the fields in which cells differ, in the order of the cell."""
    first: dict[str, Any] = {}
    varying: set[str] = set()
    for cell in cells:
        for key, value in cell.items():
            if key not in varying and not _is_equal(first.setdefault(key, value), value):
                varying.add(key)
    return tuple(key for key in first if key in varying)


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether two values are written alike in JSON: unlike in Python, `1`, `1.0` and `true` differ."""
    if value is other:
        return True
    if type(value) is type(other) and isinstance(value, (str, int, float)):
        return bool(value == other)
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_is_equal(item, other[key]) for key, item in value.items())
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)


def label(cell: CellDict, fields: Iterable[str]) -> str:
    """Return a cell as text, by the given fields: `backend=zero2 cams=4`."""
    return " ".join([f"{field}={matrix_text(cell.get(field))}" for field in fields]) or f"backend={cell['backend']}"


def short_label(cell: CellDict, fields: Iterable[str]) -> str:
    """Return `label`, in which a backend that comes first is its name alone: `zero2 cams=4`."""
    return label(cell, fields).removeprefix("backend=")


def matrix_text(value: Any) -> str:
    """Return a value of a cell as it is written in a matrix."""
    if isinstance(value, str):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ",".join([f"{key}={matrix_text(item)}" for key, item in value.items()])
    return str(value)
