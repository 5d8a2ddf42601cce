"""Launch records -> one summary a cell. The launch is the sample: steps are never pooled across launches."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from benchbox.registry.metrics import METRICS, Metric
from benchbox.registry.phases import PHASES

if TYPE_CHECKING:
    from benchbox.store.run import Run

Record = Mapping[str, Any]

MISSING = "missing"
# From best to worst. A wrong thing measured (mismatch) is worse than nothing measured.
STATUS_ORDER = ("ok", "interrupted", "unsupported", "timeout", "hang", "oom", "nan", "desync", "crash", "mismatch")


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over launches: the figure to quote (their median, or the worst for a peak), and its range."""

    value: float
    low: float
    high: float
    launches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One cell over its launches. Metrics come from the launches that ended ok, and are None when there is none."""

    cell_id: str
    cell: Mapping[str, Any]
    planned: int  # launches
    records: tuple[Record, ...]
    status: str  # the worst over launches, or "missing" when none ran
    values: Mapping[str, Spread | None]  # by metric

    @property
    def ok(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record["status"] == "ok")

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The error of the worst launch."""
        return next((record["error"] for record in self.records if record["status"] == self.status), None)

    @property
    def whole(self) -> bool:
        """Whether every planned launch ran and ended ok."""
        return self.status == "ok" and len(self.ok) >= self.planned

    @property
    def evidence(self) -> Record | None:
        """The record that shows what ran: the last ok launch, else the last that observed anything."""
        observed = [record for record in self.records if record["observed"]]
        return next(iter([*reversed(self.ok), *reversed(observed)]), None)

    def phases(self) -> dict[str, float]:
        """Seconds of each phase in a mean step of the slowest rank, mean over launches, in the order of the step.

        Means, not medians: they add up to the mean step (`mean_step_s`).
        """
        of_launches: dict[str, list[float]] = defaultdict(list)
        for record in self.ok:
            rank = _slowest_rank(record)
            for phase, times in (record["phases_s"] or {}).items():
                of_launches[phase].append(mean(times["per_rank"][rank]))
        order = [phase for phase in PHASES if phase in of_launches]
        order += [phase for phase in of_launches if phase not in PHASES]
        return {phase: mean(of_launches[phase]) for phase in order}

    def mean_step_s(self) -> float | None:
        """Mean step of the slowest rank, mean over launches: what the phases add up to."""
        steps = [mean(record["step_time_s"]["per_rank"][_slowest_rank(record)]) for record in self.ok]
        return mean(steps) if steps else None


def summarise(run: Run, records: Iterable[Record]) -> list[CellSummary]:
    """One summary for every planned cell, in the order of the plan; a cell without records is `missing`."""
    by_cell: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_cell[record["cell_id"]].append(record)
    return [_summary(cell_id, cell, run.launches, by_cell[cell_id]) for cell_id, cell in run.cells.items()]


def _summary(cell_id: str, cell: Mapping[str, Any], planned: int, records: Sequence[Record]) -> CellSummary:
    ok = [record for record in records if record["status"] == "ok"]
    return CellSummary(
        cell_id=cell_id,
        cell=cell,
        planned=planned,
        records=tuple(records),
        status=max((record["status"] for record in records), key=STATUS_ORDER.index, default=MISSING),
        values={metric.name: spread(metric, ok) for metric in METRICS.values() if metric.is_number},
    )


def spread(metric: Metric, records: Iterable[Record]) -> Spread | None:
    """A numeric metric over launches, or None when no launch knows it."""
    known = [float(value) for value in (metric.read(record) for record in records) if value is not None]
    if not known:
        return None
    value = median(known)
    if metric.launches == "worst":
        value = min(known) if metric.direction == "higher" else max(known)
    return Spread(value, min(known), max(known), len(known))


def varying(cells: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The fields in which cells differ, in the order of the cell: what tells them apart."""
    seen: dict[str, set[str]] = defaultdict(set)
    for cell in cells:
        for key, value in cell.items():
            seen[key].add(json.dumps(value, sort_keys=True))
    return tuple(key for key, values in seen.items() if len(values) > 1)


def label(cell: Mapping[str, Any], fields: Iterable[str]) -> str:
    """`backend=zero2 cams=4`: a cell by the fields that matter."""
    return " ".join(f"{field}={plain(cell.get(field))}" for field in fields) or f"backend={cell['backend']}"


def plain(value: Any) -> str:
    """A value of a cell as a matrix would spell it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={plain(item)}" for key, item in value.items())
    return "null" if value is None else str(value)


def _slowest_rank(record: Record) -> int:
    totals = [sum(steps) for steps in record["step_time_s"]["per_rank"]]
    return totals.index(max(totals))
