"""Figures of a report, drawn by matplotlib: one file for each kind, listed in `FIGURES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.report.figures import (
    batches,
    courses,
    differences,
    heat_map,
    launches,
    memory,
    pareto,
    phases,
    rank_strips,
    throughput,
)

if TYPE_CHECKING:
    from benchbox.report.figures.cells import ReportCells
    from benchbox.report.figures.drawing import Drawing

FIGURES = (pareto, batches, heat_map, launches, throughput, memory, phases, courses, rank_strips, differences)


def report_drawings(cells: ReportCells) -> tuple[Drawing, ...]:
    """Return the figures that have something to show, in their order. Nothing is drawn, and matplotlib is not imported."""
    return tuple(drawing for figure in FIGURES for drawing in figure.drawings(cells))
