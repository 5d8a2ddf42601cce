"""Figures of the cells of a run or of a baseline, in one form, so that any two of them can be compared."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from benchbox.analysis.baseline_walks import baseline_walks, resolved_point
from benchbox.analysis.certificates import certificates
from benchbox.analysis.regression import has_noise
from benchbox.analysis.run_environments import any_environment, environments_by_ranks, mixed_environment
from benchbox.analysis.summary import Spread, spread_of, summarize
from benchbox.registry.metrics import metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.baseline import Baseline
    from benchbox.store.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFigures:
    """Metrics of one cell: their value over launches, and the value of every launch by its number."""

    cell: Mapping[str, Any]
    status: str  # the worst over launches, or "missing"
    reason: str | None  # type and message of the error of a cell that failed
    values: Mapping[str, Spread | None]
    by_launch: Mapping[str, Mapping[int, float]]  # metric -> number of the launch -> value
    of_walk: bool = False  # a batch of a walk: its first launch searched


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkFigures:
    """Largest batch of a walk, of a run or a baseline."""

    cell: Mapping[str, Any]  # one of its batches
    largest: int | None  # None: no batch fits
    at_most: int | None = None  # the largest that it may try
    reason: str | None = None  # why its launches do not show what fits
    is_walk: bool | None = True  # None: an older baseline does not say whether these batches are of a walk


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Cells of a run or a baseline by id, its walks by point, and what they were measured with."""

    name: str  # as the user names it
    matrix: str
    cells: Mapping[str, CellFigures]
    environments: Mapping[int, Mapping[str, Any]]  # by number of ranks
    mixed: Mapping[str, str]  # keys of the environment that launches differ in, with the differences in words
    measure: Mapping[str, Any]
    started_at: frozenset[str]  # of the launches
    walks: Mapping[str, WalkFigures] = field(default_factory=dict)  # by `resolved_point`

    @property
    def environment(self) -> Mapping[str, Any]:
        """The environment of one of the launches, whose machine and versions are those of all."""
        return any_environment(self.environments)

    def environment_of(self, cell_id: str) -> Mapping[str, Any]:
        """Return the environment of a cell: of the launches with its number of ranks."""
        return self.environments.get(self.cells[cell_id].cell.get("world_size", 1), self.environment)


def figures_of_run(name: str, run: Run, records: Sequence[LaunchRecord]) -> RunFigures:
    """Return the figures of a run. Metrics are those of launches that ended ok."""
    numeric = [metric for metric in metrics().values() if metric.is_number]
    searched = run.cells_of_walks
    cells = {}
    summaries = summarize(run, records)
    for summary in summaries:
        if summary.beyond_memory and not summary.records:
            continue  # another walk shows that this batch does not fit: nothing is missing
        error = summary.error
        cells[summary.cell_id] = CellFigures(
            cell=summary.cell,
            status=summary.status,
            reason=f"{error['type']}: {error['message']}".splitlines()[0] if error else None,
            values=summary.values,
            by_launch={metric.name: summary.by_launch(metric) for metric in numeric},
            of_walk=summary.cell_id in searched,
        )
    return RunFigures(
        name=name,
        matrix=run.name,
        cells=cells,
        environments=environments_by_ranks(records),
        mixed=mixed_environment(records, name),
        measure=run.measure,
        started_at=frozenset(record["started_at"] for record in records),
        walks={
            resolved_point(result.batches[0].cell): WalkFigures(
                cell=(result.largest or result.batches[0]).cell,
                largest=None if result.largest is None else result.largest.cell["batch"],
                at_most=walk["at_most"],
                reason=None if result.is_conclusive else result.reason,
            )
            for walk, result in zip(run.walks, certificates(run, summaries), strict=True)
        },
    )


def without_search(figures: CellFigures) -> CellFigures:
    """Return the figures of a batch of a walk by its launches after the one that searched; metrics without noise by all.

    The launch that chose a batch favours whatever chance made fast. Where there is no other, such a metric has no launches.
    """
    by_launch, values = dict(figures.by_launch), dict(figures.values)
    for name, launches in figures.by_launch.items():
        metric = metrics().get(name)  # None: a baseline has it by an extension that is not installed here
        if metric is None or not has_noise(metric):
            continue
        by_launch[name] = {number: value for number, value in launches.items() if number > 1}
        if by_launch[name]:
            values[name] = spread_of(metric, by_launch[name].values())
    return replace(figures, by_launch=by_launch, values=values)


def figures_of_baseline(name: str, baseline: Baseline) -> RunFigures:
    """Return the figures of a baseline, whose cells have all ended ok."""
    cells = {}
    for cell_id, entry in baseline.cells.items():
        values = {
            metric: None if value is None else Spread(value["value"], value["low"], value["high"], value["launches"])
            for metric, value in entry["values"].items()
        }
        by_launch = {metric: baseline.by_launch(cell_id, metric) for metric in values}
        cells[cell_id] = CellFigures(
            cell=entry["cell"],
            status="ok",
            reason=None,
            values=values,
            by_launch=by_launch,
            of_walk=bool(baseline.is_of_walk(cell_id)),
        )
    return RunFigures(
        name=name,
        matrix=baseline.matrix,
        cells=cells,
        environments=baseline.environment_by_ranks,
        mixed={},
        measure=baseline.measure,
        started_at=frozenset(baseline.started_at),
        walks={
            point: WalkFigures(
                cell=baseline.cells[batches[max(batches)]]["cell"],
                largest=max(batches),
                at_most=baseline.at_most(batches[max(batches)]),
                is_walk=baseline.is_of_walk(batches[max(batches)]),
            )
            for point, batches in baseline_walks(baseline).items()
        },
    )
