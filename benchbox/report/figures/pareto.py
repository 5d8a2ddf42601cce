"""Throughput against peak memory: which set-ups are worth their memory."""

from __future__ import annotations

from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from benchbox.analysis.answers import precision_state
from benchbox.report.figures.cells import MAX_PANELS, by_task, series_field, series_of, series_values, setup_name, throughput
from benchbox.report.figures.drawing import MARKERS, WIDE, Drawing, add_legend, byte_scale, new_figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.figure import Figure

    from benchbox.analysis.summary import CellSummary
    from benchbox.report.figures.cells import ReportCells
    from benchbox.report.figures.drawing import Palette

KEY = "pareto"
MIN_POINTS = 3

_PANEL_HEIGHT = 3.6  # inches, without names
_MARGIN = 0.8  # inches beside a panel
_FONT_SIZE, _LINE_SPACING = 8, 1.35  # of names, which are below the panel
_CHARACTER_WIDTH = 4.8  # points: a generous one


class Point(NamedTuple):
    """A set-up: its peak memory on the worst rank, and its throughput."""

    bytes: float
    samples_per_s: float
    series: str
    name: str
    is_right: bool  # no error of the precision audit


def drawings(cells: ReportCells) -> Iterator[Drawing]:
    """Yield the figure, one panel for each task, of a run that has a task with several set-ups."""
    field = series_field(cells.axes)
    tasks = by_task(cells.summaries, cells.axes)
    panels = {task: points(members, cells.axes, field) for task, members in tasks.items()}
    panels = {task: found for task, found in panels.items() if len(found) >= MIN_POINTS}
    if not panels or len(panels) > MAX_PANELS:
        return
    names = series_values(cells.summaries, field)
    yield Drawing(
        key=KEY,
        title="Throughput against peak memory",
        description="Up and to the left is better. The line joins the set-ups that no other one beats in both, named by "
        "number. Hollow marks have an error of the precision audit and are no candidates. The table of cells has the numbers.",
        draw=partial(draw_panels, panels, names),
    )


def points(cells: Sequence[CellSummary], axes: Sequence[str], field: str | None) -> list[Point]:
    """Return the set-ups whose throughput and memory are known."""
    found = []
    for summary in cells:
        speed, peak = throughput(summary), summary.peak_bytes
        if speed is not None and peak is not None and summary.status == "ok":
            right = precision_state(summary) != "wrong"
            found.append(Point(peak, speed, series_of(summary, field), setup_name(summary, axes, field), right))
    return found


def frontier(candidates: Sequence[Point]) -> list[Point]:
    """Return the points for which no other needs at most as much memory and is at least as fast, by their memory."""
    best: list[Point] = []
    for point in sorted(candidates, key=lambda point: (point.bytes, -point.samples_per_s)):
        if not best or point.samples_per_s > best[-1].samples_per_s:
            best.append(point)
    return best


def _numbered_names(best: Sequence[Point], width: float) -> list[str]:
    """Return the lines that name the set-ups of a frontier by number. `width` is that of a panel, in inches."""
    texts = (" ".join(filter(None, (f"{number}:", point.series, point.name))) for number, point in enumerate(best, start=1))
    characters = int(72 * (width - _MARGIN) / _CHARACTER_WIDTH)
    return [line for text in texts for line in wrap(text, characters, subsequent_indent="    ", break_on_hyphens=False)]


def draw_panels(panels: dict[str, list[Point]], names: Sequence[str], palette: Palette) -> Figure:
    """Draw a panel for each task. `names` are those of all series, in the order of their colours."""
    from matplotlib.lines import Line2D

    columns = min(2, len(panels))
    best_of = {task: frontier([point for point in found if point.is_right]) for task, found in panels.items()}
    names_of_best = {task: _numbered_names(best, WIDE / columns) for task, best in best_of.items()}
    lines = [len(texts) for texts in names_of_best.values()]
    rows = [max(lines[start : start + columns]) for start in range(0, len(lines), columns)]
    height = _PANEL_HEIGHT + sum(rows) / len(rows) * _FONT_SIZE * _LINE_SPACING / 72
    figure, axes = new_figure(palette, len(rows), columns, size=(WIDE / columns, height))
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    for panel, (task, found) in zip(axes, panels.items(), strict=False):
        scale, unit = byte_scale(max(point.bytes for point in found))
        best = best_of[task]
        panel.step(
            [point.bytes / scale for point in best],
            [point.samples_per_s for point in best],
            where="post",
            color=palette.soft,
            linewidth=1,
        )
        for point in found:
            index = names.index(point.series)
            face = palette.of(index) if point.is_right else "none"
            panel.plot(
                point.bytes / scale,
                point.samples_per_s,
                marker=MARKERS[index % len(MARKERS)],
                markersize=7 if point in best else 5,
                color=palette.of(index),
                markerfacecolor=face,
                alpha=1.0 if point in best else 0.55,
                linestyle="none",
            )
        for number, point in enumerate(best, start=1):
            position = (point.bytes / scale, point.samples_per_s)
            beside = (-5, 5) if number % 2 else (6, -11)  # of neighbours, one on each side of the line
            panel.annotate(
                str(number),
                position,
                xytext=beside,
                textcoords="offset points",
                color=palette.ink,
                ha="right" if number % 2 else "left",
            )
        panel.set_title(task, fontsize=10, color=palette.ink, loc="left")
        panel.set_xlabel(f"peak memory of the worst rank ({unit})", color=palette.soft, loc="left")
        panel.annotate(
            "\n".join(names_of_best[task]),
            (0, 0),
            xycoords=panel.xaxis.label,
            xytext=(0, -4),
            textcoords="offset points",
            fontsize=_FONT_SIZE,
            color=palette.ink,
            va="top",
            linespacing=_LINE_SPACING,
        )
        panel.set_ylabel("samples/s", color=palette.soft)
        panel.set_ylim(bottom=0, top=1.15 * max(point.samples_per_s for point in found))
        panel.margins(x=0.12)
    if len(names) > 1:
        handles = [
            Line2D([], [], color=palette.of(index), marker=MARKERS[index % len(MARKERS)], linestyle="none", label=name)
            for index, name in enumerate(names)
        ]
        add_legend(figure, palette, handles)
    return figure
