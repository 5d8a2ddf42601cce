"""Set-ups compared at the fastest batch of each: the batch is chosen by their walks, and is part of what is compared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchbox.analysis.comparability import compare_pairs, reference_axis
from benchbox.analysis.inference import ONE_TEST, Criteria
from benchbox.analysis.walk import walk_point

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.analysis.certificates import Certificate
    from benchbox.analysis.comparability import Comparison
    from benchbox.analysis.summary import CellSummary


def compare_best_batches(
    results: Sequence[Certificate], reference: Mapping[str, Any], axes: Mapping[str, Any], criteria: Criteria = ONE_TEST
) -> list[Comparison]:
    """Compare the fastest batch of every walk with that of the walk which equals it except on the reference's axis.

    Walks that have not ended are left out: another batch may be faster.
    """
    fields, obstacle = reference_axis(reference, axes)
    fastest = {
        walk_point(result.fastest.cell): repeats(result.fastest)
        for result in results
        if result.fastest and result.outcome in ("complete", "capped")
    }
    pairs = [
        (summary, fastest[counterpart])
        for summary in fastest.values()
        if any(summary.cell.get(field) != value for field, value in reference.items())
        and (counterpart := walk_point({**summary.cell, **reference})) in fastest
    ]
    return list(compare_pairs(pairs, (*fields, "batch"), obstacle, criteria).values()) if fields else []


def repeats(summary: CellSummary) -> CellSummary:
    """Return a summary of the launches after the one that chose the batch, which favours whatever chance made fast."""
    records = tuple(record for record in summary.records if record["launch"] > 1)
    if not any(record["status"] == "ok" for record in records):
        return summary
    return replace(summary, records=records, planned=summary.planned - 1)
