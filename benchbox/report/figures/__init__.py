"""Figures of a report, drawn by matplotlib: one file for each, declared in `FIGURES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.report.figures import batches, heat_map, launches, pareto

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.analysis.certificates import Certificate
    from benchbox.analysis.summary import CellSummary
    from benchbox.report.figures.drawing import Drawing

FIGURES = (pareto, batches, heat_map, launches)


def drawings(summaries: Sequence[CellSummary], axes: Sequence[str], walks: Sequence[Certificate]) -> tuple[Drawing, ...]:
    """Return the figures that have something to show, in their order. Nothing is drawn, and matplotlib is not imported.

    Args:
        axes: fields in which cells differ.
        walks: certificates, of a run that searches the largest batch.
    """
    chosen = (figure.drawing(summaries, axes, walks) for figure in FIGURES)
    return tuple(drawing for drawing in chosen if drawing is not None)
