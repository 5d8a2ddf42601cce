"""The chart of a trend: values of a cell in the order of commits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchbox.analysis.quantities import counted
from benchbox.report.figures.drawing import Drawing, new_figure
from benchbox.report.site.view import commit_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchbox.analysis.trends import Trend
    from benchbox.report.figures.drawing import Palette

_SCALES = {"bytes": (2**20, "MiB"), "s": (1e-3, "ms")}
_MAX_TICKS = 12  # commits named below the axis


def trend_drawing(trend: Trend, key: str) -> Drawing:
    """Return the figure of a trend in the order of its runs, with the range over launches and its changes.

    Args:
        key: of the figure on its page: ids within the SVG begin with it.
    """
    changes = len(trend.changes)
    marked = f"{counted(changes, 'change')} marked" if changes else "no change"
    return Drawing(
        key=key,
        title=f"{trend.metric.name} over commits",
        description=f"{len(trend.points)} runs in the order of their commits, {marked}; the table has the values.",
        draw=partial(_draw, trend),
        section="trend",
    )


def _draw(trend: Trend, palette: Palette) -> Figure:
    from matplotlib.ticker import MaxNLocator

    scale, unit = _SCALES.get(trend.metric.unit, (1.0, trend.metric.unit))
    values, lows, highs = ([getattr(point, name) / scale for point in trend.points] for name in ("value", "low", "high"))
    figure, (panel,) = new_figure(palette, size=(7.6, 2.1))
    positions = range(len(values))
    panel.vlines(positions, lows, highs, color=palette.accent, linewidth=3, alpha=0.35)
    panel.plot(positions, values, color=palette.accent, linewidth=1.2, marker="o", markersize=4.5)
    for change in trend.changes:
        colour = palette.soft if change.is_drift else palette.bad if change.is_worse else palette.ok
        panel.axvline(change.index - 0.5, color=colour, linewidth=1.4, linestyle=(0, (4, 3)))
        panel.annotate(
            "from 0" if change.ratio is None else f"{change.ratio:.2f}x",
            (change.index - 0.5, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -3),
            textcoords="offset points",
            color=colour,
            va="top",
        )
    low, high = min(lows), max(highs)
    margin = (high - low) * 0.15 or abs(high) * 0.05 or 1.0
    panel.set_ylim(low - margin, high + margin)
    panel.set_xlim(-0.6, len(values) - 0.4)
    shown = list(positions)[:: -(-len(values) // _MAX_TICKS)]
    panel.set_xticks(shown, [commit_text(trend.points[index]) for index in shown])
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4))
    panel.set_ylabel(unit, color=palette.soft)
    panel.grid(axis="x", visible=False)
    panel.spines["left"].set_visible(False)
    return figure
