"""Loss and gradient norm of every cell over the steps of its first launch that ended ok."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from benchbox.analysis.summary import label
from benchbox.report.figures.curves import MAX_CURVES, Curve, curve_drawing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.report.figures.cells import ReportCells
    from benchbox.report.figures.drawing import Drawing

MIN_STEPS = 20  # fewer steps show no course
_DESCRIPTIONS: dict[Literal["loss", "grad_norm"], tuple[str, str]] = {
    "loss": ("Loss by step", "Loss of the global batch, before the update of each step"),
    "grad_norm": ("Gradient norm by step", "Norm of all gradients before clipping"),
}


def drawings(cells: ReportCells) -> Iterator[Drawing]:
    """Yield a figure for each quantity of cells with `MIN_STEPS` steps, unless there are more cells than colours."""
    for key, (title, description) in _DESCRIPTIONS.items():
        measured = [summary for summary in cells.summaries if summary.ok and len(summary.ok[0][key] or ()) >= MIN_STEPS]
        courses = [(label(summary.cell, cells.axes), summary.ok[0][key] or []) for summary in measured]
        curves = [Curve(name, range(len(values)), values) for name, values in courses]
        if len(curves) <= MAX_CURVES and any(value for curve in curves for value in curve.values):
            yield curve_drawing(
                curves,
                key=key,
                title=title,
                description=f"{description}, of each cell's first launch. Warm-up steps are included.",
                section="charts",
            )
