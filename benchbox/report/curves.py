"""Curves over the steps of a launch: loss and gradient norm. Units of the geometry are SVG user units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchbox.analysis.summary import label
from benchbox.report.charts import CHARACTER, GAP, HALF, LegendEntry, Tick, nice_ticks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.analysis.summary import CellSummary

MIN_STEPS = 20  # fewer steps show no course
MAX_CURVES = 9  # as many as there are colours
HEIGHT = 260.0
AXIS_HEIGHT = 42.0  # of the labels of steps and their title
TOP = 8.0  # above the highest value


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values of one cell. `path` is its SVG path, interrupted at steps without a value."""

    name: str
    colour: str
    path: str
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YTick:
    y: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveChart:
    """Curves of all cells over the steps, from zero up to the highest value."""

    key: str
    title: str
    description: str
    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[YTick, ...]
    left: float
    width: float = HALF
    height: float = HEIGHT

    @property
    def bottom(self) -> float:
        """Position of zero."""
        return self.height - AXIS_HEIGHT

    @property
    def legend(self) -> tuple[LegendEntry, ...]:
        return tuple(LegendEntry(colour=curve.colour, text=curve.name) for curve in self.curves)


def draw_curves(summaries: Sequence[CellSummary], axes: Sequence[str]) -> tuple[CurveChart, ...]:
    """Draw the loss and the gradient norm of every cell's first launch that ended ok.

    There are none for cells with fewer than `MIN_STEPS` steps, and none of more cells than there are colours.
    """
    charts = (
        _draw(summaries, axes, "loss", "Loss by step", "Loss of the global batch, before the update of each step"),
        _draw(summaries, axes, "grad_norm", "Gradient norm by step", "Norm of all gradients before clipping"),
    )
    return tuple(chart for chart in charts if chart is not None)


def _draw(
    summaries: Sequence[CellSummary], axes: Sequence[str], key: Literal["loss", "grad_norm"], title: str, description: str
) -> CurveChart | None:
    measured = [summary for summary in summaries if summary.ok and len(summary.ok[0][key] or ()) >= MIN_STEPS]
    if len(measured) > MAX_CURVES:
        return None
    courses = [(label(summary.cell, axes), list(summary.ok[0][key] or ())) for summary in measured]
    numbers = [value for _, values in courses for value in values if value is not None]
    if not numbers or max(numbers) <= 0:
        return None
    highest, steps = max(numbers), max(len(values) for _, values in courses)
    y_values = nice_ticks(highest)
    left = max(len(f"{value:g}") for value in y_values) * CHARACTER + GAP
    per_step, per_unit = (HALF - left - 2 * GAP) / (steps - 1), (HEIGHT - AXIS_HEIGHT - TOP) / highest
    bottom = HEIGHT - AXIS_HEIGHT
    return CurveChart(
        key=key,
        title=title,
        description=f"{description}, of each cell's first launch. Warm-up steps are included.",
        curves=tuple(
            Curve(
                name=name,
                colour=f"s{index}",
                path=line_path(
                    [None if v is None else (left + i * per_step, bottom - v * per_unit) for i, v in enumerate(values)]
                ),
                last=next(value for value in reversed(values) if value is not None),
            )
            for index, (name, values) in enumerate(courses)
            if any(value is not None for value in values)
        ),
        x_ticks=tuple(Tick(x=left + step * per_step, text=f"{step:g}") for step in nice_ticks(steps - 1)),
        y_ticks=tuple(YTick(y=bottom - value * per_unit, text=f"{value:g}") for value in y_values),
        left=left,
    )


def line_path(points: Sequence[tuple[float, float] | None]) -> str:
    """Return an SVG path through the points, with a new start after each gap."""
    parts: list[str] = []
    is_drawing = False
    for point in points:
        if point is not None:
            parts.append(f"{'L' if is_drawing else 'M'}{point[0]:.1f} {point[1]:.1f}")
        is_drawing = point is not None
    return "".join(parts)
