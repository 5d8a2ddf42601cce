"""Time of a step by what a rank does in it: a strip for every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.quantities import quantity
from benchbox.analysis.stragglers import describe_ranks, mean_split
from benchbox.analysis.summary import label
from benchbox.report.figures.bars import Bar, BarPart, bar_drawing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.analysis.summary import CellSummary
    from benchbox.report.figures.cells import ReportCells
    from benchbox.report.figures.drawing import Drawing

MAX_STRIPS = 64  # with more ranks in all cells together, only cells whose ranks stand out are drawn, those that wait most
_Split = tuple["CellSummary", dict[str, list[float]]]  # seconds of each part of a step, by rank
PARTS = {
    "data_wait": ("waiting for data", "p0"),
    "compute": ("own work", "p2"),
    "core_wait": ("waiting for a core", "p6"),
    "rank_wait": ("waiting for other ranks", "p3"),
    "transfer": ("transfer", "p1"),
}


def drawings(cells: ReportCells) -> Iterator[Drawing]:
    """Yield the figure of a run with launches whose steps were split."""
    splits = [(summary, split) for summary in cells.summaries if (split := mean_split(summary))]
    if sum(len(split["compute"]) for _, split in splits) > MAX_STRIPS:
        splits = _that_wait_most([(summary, split) for summary, split in splits if describe_ranks(summary)])
    yield from bar_drawing(
        [bar for summary, split in splits for bar in _strips(summary, split, cells.axes)],
        key="ranks",
        title="Where a step of each rank goes (ms)",
        description="Mean over steps and launches.",
        section="ranks",
        is_wide=True,
        legend=list(PARTS.values()),
    )


def _that_wait_most(splits: list[_Split]) -> list[_Split]:
    """Return the cells whose ranks wait for the largest shares of a step, in their order: at most `MAX_STRIPS` strips."""

    def share(index: int) -> float:
        waits = sum(map(sum, (splits[index][1][part] for part in ("rank_wait", "transfer"))))
        return waits / (sum(map(sum, splits[index][1].values())) or 1.0)

    kept: list[int] = []
    strips = 0
    for index in sorted(range(len(splits)), key=share, reverse=True):
        strips += len(splits[index][1]["compute"])
        if strips > MAX_STRIPS:
            break
        kept.append(index)
    return [splits[index] for index in sorted(kept)]


def _strips(summary: CellSummary, split: dict[str, list[float]], axes: Sequence[str]) -> Iterator[Bar]:
    group = label(summary.cell, axes)
    for rank in range(len(split["compute"])):
        seconds = [split[part][rank] for part in PARTS]
        parts = tuple(
            BarPart(name, 1e3 * part_s, colour, quantity(part_s, "s"))
            for (name, colour), part_s in zip(PARTS.values(), seconds, strict=True)
        )
        yield Bar(group=group, name=f"rank {rank}", parts=parts, text=quantity(sum(seconds), "s"))
