"""Throughput of every cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.quantities import quantity
from benchbox.report.figures.bars import Bar, BarPart, bar_drawing
from benchbox.report.figures.cells import BarNames, launches_note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.report.figures.cells import ReportCells
    from benchbox.report.figures.drawing import Drawing


def drawings(cells: ReportCells) -> Iterator[Drawing]:
    """Yield the figure, unless there are too many cells or none ended ok."""
    if cells.are_too_many_for_bars:
        return
    names = BarNames(cells)
    bars = []
    for summary in cells.summaries:
        spread = summary.values["global_samples_per_s"]
        name, text = names.name(summary), summary.status if spread is None else quantity(spread.value, "samples/s")
        bars.append(
            Bar(
                group=names.group(summary),
                name=name,
                parts=() if spread is None else (BarPart(name, spread.value, names.colour(summary), text),),
                text=text if spread is None else text + launches_note(summary),
                spread=None if spread is None else (spread.low, spread.high),
            )
        )
    yield from bar_drawing(
        bars,
        key="throughput",
        title="Throughput (samples/s, more is better)",
        description="Global samples per second of the slowest rank: the median over launches, whiskers from lowest to highest.",
    )
