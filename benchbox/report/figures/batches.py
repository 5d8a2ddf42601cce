"""Throughput over the batch of every walk: the fastest batch is often not the largest."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchbox.report.figures.cells import MAX_PANELS, by_task, series_field, series_of, series_values, setup_name, throughput
from benchbox.report.figures.drawing import MARKERS, Drawing, add_legend, new_figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.figure import Figure

    from benchbox.analysis.certificates import Certificate
    from benchbox.report.figures.cells import ReportCells
    from benchbox.report.figures.drawing import Palette

KEY = "batches"


def drawings(cells: ReportCells) -> Iterator[Drawing]:
    """Yield the figure, one panel for each task and set-up but the series, of a run with walks."""
    shown = [walk for walk in cells.walks if any(throughput(cell) is not None for cell in walk.batches)]
    if not shown:
        return
    field = series_field(cells.axes)
    context = [name for name in cells.axes if name != "batch"]
    panels: dict[str, list[Certificate]] = {}
    for walk in shown:
        task = next(iter(by_task([walk.batches[0]], cells.axes)))
        name = setup_name(walk.batches[0], context, field)
        panels.setdefault(", ".join(filter(None, (task, name))), []).append(walk)
    if len(panels) > MAX_PANELS:
        return
    names = series_values(cells.summaries, field)
    yield Drawing(
        key=KEY,
        title="Throughput over the batch of a rank",
        description="Every batch that was tried. A ring is the fastest batch of a walk, a cross the first that does not fit. "
        "The table of largest batches has the numbers.",
        draw=partial(_draw, panels, names, field),
    )


def _draw(panels: dict[str, list[Certificate]], names: Sequence[str], field: str | None, palette: Palette) -> Figure:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    columns = min(2, len(panels))
    figure, axes = new_figure(palette, -(-len(panels) // columns), columns, size=(10.4 / columns, 2.7))
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    for panel, (title, walks) in zip(axes, panels.items(), strict=False):
        for walk in walks:
            series = series_of(walk.batches[0], field)
            index = names.index(series)
            tried = [(cell.cell["batch"], speed) for cell in walk.batches if (speed := throughput(cell)) is not None]
            panel.plot(*zip(*tried, strict=True), color=palette.of(index), marker=MARKERS[index % len(MARKERS)], markersize=5)
            if walk.fastest is not None and (speed := throughput(walk.fastest)) is not None:
                batch = walk.fastest.cell["batch"]
                panel.plot(batch, speed, marker="o", markersize=12, markerfacecolor="none", color=palette.of(index))
            if walk.beyond is not None:
                panel.plot(walk.beyond.cell["batch"], 0, marker="x", markersize=7, color=palette.of(index), clip_on=False)
        panel.set_title(title, fontsize=10, color=palette.ink, loc="left")
        panel.set_xlabel("batch of a rank", color=palette.soft)
        panel.set_ylabel("samples/s", color=palette.soft)
        panel.set_ylim(bottom=0)
        panel.margins(y=0.2)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    handles = [
        Line2D([], [], color=palette.of(index), marker=MARKERS[index % len(MARKERS)], label=name)
        for index, name in enumerate(names)
        if name
    ]
    beyond = Line2D([], [], color=palette.soft, marker="x", linestyle="none", label="does not fit")
    add_legend(figure, palette, [*handles, beyond])
    return figure
