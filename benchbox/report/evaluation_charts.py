"""Curves over the steps of trainings, for a report on what their checkpoints do. Units of the geometry are SVG user units."""

from __future__ import annotations

from dataclasses import dataclass

from benchbox.report.charts import CHARACTER, GAP, HALF, Tick, nice_ticks
from benchbox.report.curves import AXIS_HEIGHT, HEIGHT, TOP, Curve, CurveChart, YTick


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCurve:
    """Values of one training by step, as pairs (step, value)."""

    name: str
    points: tuple[tuple[float, float], ...]


def draw_training_curves(key: str, title: str, description: str, curves: tuple[TrainingCurve, ...]) -> CurveChart:
    """Draw the curves over a common axis of steps, from zero up to the highest value.

    Raises:
        ValueError: there is no positive value, or no step after 0.
    """
    points = [point for curve in curves for point in curve.points]
    steps, highest = max((step for step, _ in points), default=0), max((value for _, value in points), default=0)
    if steps <= 0 or highest <= 0:
        raise ValueError(f"{title}: nothing to draw")
    y_values = nice_ticks(highest)
    left = max(len(f"{value:g}") for value in y_values) * CHARACTER + GAP
    per_step, per_unit = (HALF - left - 2 * GAP) / steps, (HEIGHT - AXIS_HEIGHT - TOP) / highest
    bottom = HEIGHT - AXIS_HEIGHT
    return CurveChart(
        key=key,
        title=title,
        description=description,
        curves=tuple(
            Curve(
                name=curve.name,
                colour=f"s{index}",
                path="M"
                + "L".join(f"{left + step * per_step:.1f} {bottom - value * per_unit:.1f}" for step, value in curve.points),
                last=curve.points[-1][1],
            )
            for index, curve in enumerate(curves)
        ),
        x_ticks=tuple(Tick(x=left + step * per_step, text=f"{step:g}") for step in nice_ticks(steps)),
        y_ticks=tuple(YTick(y=bottom - value * per_unit, text=f"{value:g}") for value in y_values),
        left=left,
    )
