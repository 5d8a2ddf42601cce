"""Comparisons of the cells of a run without walks, from summaries of cells."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchbox.analysis.best_batches import compare_run
from benchbox.analysis.inference import ONE_TEST
from tests.support.example_run import CELL, example_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.analysis.comparability import Comparison
    from benchbox.analysis.inference import Criteria
    from benchbox.analysis.summary import CellSummary


def compared_cells(
    summaries: Sequence[CellSummary],
    reference: Mapping[str, Any],
    axes: Mapping[str, Any] | None = None,
    criteria: Criteria = ONE_TEST,
) -> Mapping[str, Comparison]:
    """Return the comparisons of cells with the reference, by the id of the subject."""
    run = replace(example_run([CELL]), reference=dict(reference), matrix={"axes": axes or {}})
    return compare_run(run, summaries, (), criteria).cells
