"""Step time of every launch: how far launches of one cell lie apart."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from benchbox.registry.metrics import metric_by_name
from benchbox.report.figures.cells import row_heading, row_name, series_field, series_of, series_values
from benchbox.report.figures.drawing import MARKERS, Drawing, name_rows, new_figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.figure import Figure

    from benchbox.report.figures.cells import ReportCells
    from benchbox.report.figures.drawing import Palette

KEY = "launches"
MIN_LAUNCHES, MAX_CELLS = 3, 40


class Row(NamedTuple):
    """Step times of the launches of a cell in ms, and the index of its series."""

    name: str
    values: list[float]
    series: int


def drawings(cells: ReportCells) -> Iterator[Drawing]:
    """Yield the figure of the cells with three launches or more, unless there are too many to be read."""
    metric, field = metric_by_name("step_time_s"), series_field(cells.axes)
    names = series_values(cells.summaries, field)
    fields, rows = cells.axes or ["backend"], []
    for summary in cells.summaries:
        values = [1e3 * value for value in summary.by_launch(metric).values()]
        if len(values) >= MIN_LAUNCHES:
            rows.append(Row(row_name(summary, fields), values, names.index(series_of(summary, field))))
    if not rows or len(rows) > MAX_CELLS:
        return
    yield Drawing(
        key=KEY,
        title="Step time of every launch (ms)",
        description="A mark is a launch: the median of its steps on the slowest rank. The line is the median of the launches. "
        "The launch is the sample: a difference smaller than the spread of the marks is not settled.",
        draw=partial(_draw, row_heading(fields), rows),
    )


def _draw(heading: str, rows: Sequence[Row], palette: Palette) -> Figure:
    figure, (panel,) = new_figure(palette, size=(10.4, 1.1 + 0.3 * len(rows)))
    panel.grid(axis="y", visible=False)
    for position, row in enumerate(rows):
        middle = median(row.values)
        marker = MARKERS[row.series % len(MARKERS)]
        panel.plot(
            row.values,
            [position] * len(row.values),
            marker,
            color=palette.of(row.series),
            markersize=5,
            alpha=0.7,
            linestyle="none",
        )
        panel.plot([middle, middle], [position - 0.35, position + 0.35], color=palette.ink, linewidth=1.5)
    name_rows(figure, panel, palette, heading, [row.name for row in rows])
    panel.set_xlim(left=0)
    panel.set_xlabel("step time of a launch (ms)", color=palette.soft)
    return figure
