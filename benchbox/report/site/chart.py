"""The chart of a trend: SVG by matplotlib, with the colours of the page, so that it follows light and dark."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from benchbox.report.site.view import commit_text

if TYPE_CHECKING:
    from benchbox.analysis.trends import Trend

# Stand-ins while matplotlib draws: the page's own colours are variables of its style sheet.
_INK, _SOFT, _LINE, _ACCENT, _BAD, _OK = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
_VARIABLES = {_INK: "--ink", _SOFT: "--soft", _LINE: "--line", _ACCENT: "--accent", _BAD: "--bad", _OK: "--ok"}
_SCALES = {"bytes": (2**20, "MiB"), "s": (1e-3, "ms")}
_MAX_TICKS = 12  # commits named below the axis


def draw_trend(trend: Trend, key: str) -> str:
    """Draw the values of a trend in the order of its runs, with the range over launches and its changes.

    Args:
        key: of the chart on its page: ids within the SVG begin with it.

    Returns:
        An `<svg>` element to be put into a page.
    """
    import matplotlib as mpl
    from matplotlib import figure as plots
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.ticker import MaxNLocator

    scale, unit = _SCALES.get(trend.metric.unit, (1.0, trend.metric.unit))
    values, lows, highs = ([getattr(point, name) / scale for point in trend.points] for name in ("value", "low", "high"))
    settings = {"svg.fonttype": "none", "svg.hashsalt": key, "font.size": 10, "axes.unicode_minus": False}
    with mpl.rc_context(settings):
        drawing = plots.Figure(figsize=(7.6, 2.1), layout="constrained")
        axes = drawing.add_subplot()
        positions = range(len(values))
        axes.vlines(positions, lows, highs, color=_ACCENT, linewidth=3, alpha=0.35)
        axes.plot(positions, values, color=_ACCENT, linewidth=1.2, marker="o", markersize=4.5)
        for change in trend.changes:
            colour = _SOFT if change.is_drift else _BAD if change.is_worse else _OK
            axes.axvline(change.index - 0.5, color=colour, linewidth=1.4, linestyle=(0, (4, 3)))
            axes.annotate(
                f"{change.ratio:.2f}x",
                (change.index - 0.5, 1),
                xycoords=("data", "axes fraction"),
                xytext=(4, -3),
                textcoords="offset points",
                color=colour,
                va="top",
            )
        low, high = min(lows), max(highs)
        margin = (high - low) * 0.15 or abs(high) * 0.05 or 1.0
        axes.set_ylim(low - margin, high + margin)
        axes.set_xlim(-0.6, len(values) - 0.4)
        shown = list(positions)[:: -(-len(values) // _MAX_TICKS)]
        axes.set_xticks(shown, [commit_text(trend.points[index]) for index in shown])
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.set_ylabel(unit, color=_SOFT)
        axes.tick_params(colors=_SOFT, length=3)
        axes.grid(axis="y", color=_LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_LINE)
        stream = io.BytesIO()
        FigureCanvasSVG(drawing).print_svg(stream, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _themed(stream.getvalue().decode(), key, _description(trend))


def _themed(svg: str, key: str, description: str) -> str:
    """Return only the element, with ids of its own, the fonts and colours of the page, and its description."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)  # of groups, which nothing refers to
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{key}-", svg)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([0-9.]+px) [^;\"]+", r"font-size: \1; font-family: inherit", svg)
    svg = re.sub(r"(<g>\s*<path d=\"[^\"]*\"\s*style=\"fill: #ffffff[^\"]*\"/>\s*</g>)", "", svg)  # the background
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    opening, _, rest = svg.partition(">")
    opening = re.sub(r' (width|height)="[0-9.]+pt"', "", opening)
    return f'{opening} role="img" aria-label="{description}" class="trend">{rest}'.rstrip()


def _description(trend: Trend) -> str:
    """Return what the chart shows in one sentence; it has no characters that need escaping."""
    changes = len(trend.changes)
    marked = f"{changes} change{'' if changes == 1 else 's'} marked" if changes else "no change"
    return f"{trend.metric.name} of {len(trend.points)} runs in the order of their commits, {marked}; the table has the values"
