"""Differences of loss and gradient norm of cells from their reference, with the tolerance."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from benchbox.analysis.equivalence import NAMES, QUANTITIES
from benchbox.analysis.summary import label, varying_fields
from benchbox.report.figures.curves import LIMIT, MAX_CURVES, Curve, curve_drawing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchbox.analysis.equivalence import Difference, Quantity
    from benchbox.analysis.summary import CellSummary
    from benchbox.report.figures.cells import ReportCells
    from benchbox.report.figures.drawing import Drawing

MAX_GROUPS = 4  # more figures than this are not looked at
MIN_STEPS = 10  # fewer show no course


def drawings(cells: ReportCells) -> Iterator[Drawing]:
    """Yield a figure of each quantity for each group of cells that have the same reference."""
    groups: dict[str, list[tuple[CellSummary, Mapping[Quantity, Difference]]]] = defaultdict(list)
    references: dict[str, CellSummary] = {}
    for summary in cells.summaries:
        equivalence = summary.equivalence
        if equivalence is None or equivalence.reference is None:
            continue
        references[equivalence.reference.cell_id] = equivalence.reference
        differences = equivalence.differences
        if differences and min(len(difference.values) for difference in differences.values()) >= MIN_STEPS:
            groups[equivalence.reference.cell_id].append((summary, differences))
    if len(groups) > MAX_GROUPS:
        return
    all_fields = varying_fields([reference.cell for reference in references.values()])
    for number, (cell_id, group) in enumerate(groups.items()):
        if len(group) >= MAX_CURVES:  # the tolerance has a colour too
            continue
        fields = varying_fields([references[cell_id].cell, *(summary.cell for summary, _ in group)])
        shared = label(references[cell_id].cell, all_fields if len(groups) > 1 else fields)
        for name in QUANTITIES:
            courses = [(label(summary.cell, fields), differences[name]) for summary, differences in group]
            yield _drawing(f"equivalence-{number}-{name}", name, shared, courses)


def _drawing(key: str, name: Quantity, reference: str, courses: Sequence[tuple[str, Difference]]) -> Drawing:
    tolerances = max((difference.tolerances for _, difference in courses), key=len)
    curves = [Curve(text, range(len(difference.values)), difference.values) for text, difference in courses]
    return curve_drawing(
        [*curves, Curve("tolerance", range(len(tolerances)), tolerances, LIMIT)],
        key=key,
        title=f"Difference of the {NAMES[name]} by step",
        description=f"Relative to {reference}, on a logarithmic scale: no difference lies on the axis, and a cell above the "
        "tolerance is diverged.",
        section="equivalence",
        is_logarithmic=True,
    )
