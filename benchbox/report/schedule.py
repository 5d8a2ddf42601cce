"""Learning rates over the steps of a training, as text and as an SVG figure. The same rates give the same bytes."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from benchbox.report.charts import nice_ticks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM, _LINE = 720.0, 260.0, 76.0, 16.0, 12.0, 40.0, 18.0
_MAX_POINTS = 600  # of a curve
_STYLE = """
  svg { --page: #ffffff; --ink: #16202c; --grid: #dde2e8; font: 12px sans-serif; background: var(--page); }
  @media (prefers-color-scheme: dark) { svg { --page: #18202a; --ink: #e8edf3; --grid: #2c3744; } }
  text { fill: var(--ink); } .grid { stroke: var(--grid); } .curve { fill: none; stroke-width: 2; }
"""
_COLOURS = ("#2f6fde", "#d9730d", "#1f8f6b", "#b83280", "#7a56cf", "#a8860b", "#0e8aa8", "#a4512f", "#66768a")


def draw_bars(rates: Sequence[float], highest: float, width: int) -> str:
    """Draw rates as one line of block characters, a full block for `highest`. A rate above 0 is never blank."""
    columns = min(width, len(rates))
    if highest <= 0:
        return _BLOCKS[0] * columns
    sampled = [rates[index * len(rates) // columns] for index in range(columns)]
    return "".join(_BLOCKS[0 if rate <= 0 else max(1, round(rate / highest * (len(_BLOCKS) - 1)))] for rate in sampled)


def draw_svg(curves: Mapping[str, Sequence[float]], title: str) -> str:
    """Draw the rates of every step by the name of their curve, as a complete SVG file for light and dark pages."""
    steps = max(len(rates) for rates in curves.values())
    highest = max(max(rates) for rates in curves.values()) or 1.0
    per_step, per_unit = (_WIDTH - _LEFT - _RIGHT) / max(1, steps - 1), (_HEIGHT - _TOP - _BOTTOM) / highest
    bottom = _HEIGHT - _BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT + _LINE * len(curves):g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
    ]
    for value in nice_ticks(highest):
        y = bottom - value * per_unit
        lines.append(f'<line class="grid" x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 8:g}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    lines += [
        f'<text x="{_LEFT + step * per_step:.1f}" y="{bottom + 18:g}" text-anchor="middle">{step:g}</text>'
        for step in (nice_ticks(steps - 1) if steps > 1 else [0.0])
    ]
    lines.append(f'<text x="{_WIDTH - _RIGHT:g}" y="{bottom + 34:g}" text-anchor="end">step</text>')
    for number, (name, rates) in enumerate(curves.items()):
        colour, y = _COLOURS[number % len(_COLOURS)], _HEIGHT + _LINE * number + 6
        points = [(_LEFT + step * per_step, bottom - rates[step] * per_unit) for step in _shown_steps(rates)]
        path = "L".join(f"{x:.1f} {height:.1f}" for x, height in points)
        lines.append(f'<path class="curve" stroke="{colour}" d="M{path}"><title>{escape(name)}</title></path>')
        lines.append(f'<path stroke="{colour}" stroke-width="3" d="M{_LEFT:g} {y - 4:g}h18"/>')
        lines.append(f'<text x="{_LEFT + 26:g}" y="{y:g}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _shown_steps(rates: Sequence[float]) -> list[int]:
    """Return the steps that are drawn: evenly spaced, and both sides of every jump to or from 0."""
    stride = max(1, len(rates) // _MAX_POINTS)
    jumps = {step for step in range(1, len(rates)) if (rates[step] == 0) != (rates[step - 1] == 0)}
    return sorted({*range(0, len(rates), stride), len(rates) - 1, *jumps, *(step - 1 for step in jumps)})
