"""Curves over steps, each with a colour, a line style and a marker of its own."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from benchbox.report.figures.drawing import HALF, MARKERS, WIDE, Drawing, add_legend, legend_columns, new_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from benchbox.report.figures.drawing import Palette, Section

MAX_CURVES = 9  # as many as there are colours
MARKS = 7  # on a curve
LIMIT = "bad"  # colour of a curve that the others should stay below; it is dashed


class Curve(NamedTuple):
    """Values by step. `values` are interrupted at steps without one."""

    name: str
    steps: Sequence[float]
    values: Sequence[float | None]
    colour: str | None = None  # a name of `Palette.named`; by default that of the curve's number


def curve_drawing(
    curves: Sequence[Curve],
    *,
    key: str,
    title: str,
    description: str,
    section: Section,
    is_wide: bool = False,
    is_logarithmic: bool = False,
    label: str | None = None,
) -> Drawing:
    """Return the figure of curves from zero upwards, or on a logarithmic scale on whose lower end zero is drawn.

    Args:
        label: of the axis of values, in place of a title that is too long for it.
    """
    ends = []
    for curve in curves:
        end = next((value for value in reversed(curve.values) if value is not None), None)
        ends.append(f"{curve.name} has no value." if end is None else f"{curve.name} ends at {end:.3g}.")
    return Drawing(
        key=key,
        title=title,
        description=description,
        draw=partial(_draw, curves, label or title, WIDE if is_wide else HALF, is_logarithmic),
        section=section,
        is_wide=is_wide,
        values=" ".join(ends),
    )


def _draw(curves: Sequence[Curve], label: str, width: float, is_logarithmic: bool, palette: Palette) -> Figure:
    from matplotlib.ticker import MaxNLocator

    names = [curve.name for curve in curves]
    legend_rows = -(-len(names) // legend_columns(names, width))
    figure, (panel,) = new_figure(palette, size=(width, 2.5 + 0.21 * legend_rows))
    low, high = decades(curves) if is_logarithmic else (-math.inf, math.inf)
    lines = []
    for number, curve in enumerate(curves):
        values = [math.nan if value is None else min(max(value, low), high) for value in curve.values]
        is_limit = curve.colour == LIMIT
        offset = (number * max(1, len(values) // MARKS // len(curves))) % max(1, len(values))
        (line,) = panel.plot(
            curve.steps,
            values,
            color=palette.named(curve.colour or f"s{number}"),
            linestyle="--" if is_limit or number % 2 else "-",
            linewidth=1.5,
            marker="" if is_limit else MARKERS[number % len(MARKERS)],
            markersize=4.5,
            markevery=(offset, max(1, len(values) // MARKS)),
            label=curve.name,
            clip_on=False,
        )
        lines.append(line)
    if is_logarithmic:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda value, _: f"1e{round(math.log10(value))}")
        panel.minorticks_off()
        panel.set_ylim(low, high)
    elif all(value is None or not value < 0 for curve in curves for value in curve.values):
        panel.set_ylim(bottom=0)
    panel.margins(x=0.01)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panel.set_xlabel("step", color=palette.soft, fontsize=8)
    panel.set_ylabel(label, color=palette.soft, fontsize=8)
    panel.tick_params(labelsize=8)
    add_legend(figure, palette, lines)
    return figure


def decades(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return powers of ten between which the positive values of curves lie, the lower one without touching it."""
    positive = [value for curve in curves for value in curve.values if value is not None and 0 < value < math.inf]
    low, high = math.floor(math.log10(min(positive) / 2)), math.ceil(math.log10(max(positive)))
    return 10.0**low, 10.0 ** max(high, low + 1)
