"""Comparisons of a run with its reference, of cells and of walks: a walk is compared at its fastest batch.

The launch that searched chose that batch, so it favours whatever chance made fast, and is not tested. Launches after it repeat
the fastest batch only: those of the other batches settle nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchbox.analysis.certificates import ENDED
from benchbox.analysis.comparability import compare_pair, pairs_with_reference, reference_axis, with_verdicts
from benchbox.analysis.inference import ONE_TEST, Criteria
from benchbox.analysis.walk import walk_point
from benchbox.registry.statuses import DIVERGED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.analysis.certificates import Certificate
    from benchbox.analysis.comparability import Comparison
    from benchbox.analysis.summary import CellSummary
    from benchbox.store.run import Run


_SEARCH, _REPEATS = range(1, 2), range(2, sys.maxsize)  # numbers of launches of a batch of a walk


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparisons:
    """Comparisons with the reference of a run. Verdicts hold for all of them at once, and one pair of cells has one verdict."""

    cells: Mapping[str, Comparison]  # of cells that differ in the axis of the reference only, by the id of the subject
    walks: tuple[Comparison, ...]  # of walks that differ in that axis only, each at its fastest batch


def compare_run(
    run: Run, summaries: Sequence[CellSummary], results: Sequence[Certificate], criteria: Criteria = ONE_TEST
) -> RunComparisons:
    """Compare the cells and the walks of a run with its reference.

    Cells of two walks at the same batch are compared by the launches that searched, which settle nothing, unless it is the
    fastest batch of both; so is a batch that its walk does not repeat with a cell that is in no walk.

    Args:
        results: of the walks of the run.
    """
    if not run.reference:
        return RunComparisons(cells={}, walks=())
    fields, obstacle = reference_axis(run.reference, run.matrix.get("axes") or {})
    searched = run.cells_of_walks
    pairs = pairs_with_reference(summaries, run.reference)
    unrepeated = searched - {walk["fastest"] for walk in run.walks}
    measured = [pair for pair in pairs if not _is_search(pair, searched, unrepeated)]
    walks = _pairs_of_walks(results, run.reference)
    tested = max(1, len(measured) + len(walks))
    comparisons = {}
    for subject, reference in measured:
        batches = [cell for cell in (subject, reference) if cell is not None and cell.cell_id in searched]
        judged = {cell.cell_id: repeats(cell) for cell in batches}
        sides = judged.get(subject.cell_id, subject), reference and judged.get(reference.cell_id, reference)
        comparison = compare_pair(*sides, fields, obstacle, criteria, tested)
        comparisons["cells", subject.cell_id] = replace(comparison, is_search=not all(map(has_repeats, batches)))
    for walk, other in walks:
        reason = obstacle or why_walk_diverges(walk) or why_walk_diverges(other)
        comparison = _compare_walks(walk, other, (*fields, "batch"), reason, criteria, tested)
        comparisons["walks", comparison.subject.cell_id] = comparison
    comparisons = with_verdicts(comparisons, criteria)
    best = tuple(comparison for (kind, _), comparison in comparisons.items() if kind == "walks")
    of_walks = {comparison.pair_id: replace(comparison, axis=fields, of_walks=False) for comparison in best}
    cells = {}
    for subject, reference in pairs:
        if ("cells", subject.cell_id) in comparisons:
            cells[subject.cell_id] = comparisons["cells", subject.cell_id]
            continue
        comparison = compare_pair(_search_of(subject), reference and _search_of(reference), fields, obstacle, criteria, tested)
        cells[subject.cell_id] = of_walks.get(comparison.pair_id) or replace(comparison, is_search=True)
    return RunComparisons(cells=cells, walks=best)


def _is_search(pair: tuple[CellSummary, CellSummary | None], searched: set[str], unrepeated: set[str]) -> bool:
    """Return whether launches of a pair only searched, or are compared as those of walks: see `compare_run`."""
    cell_ids = {cell.cell_id for cell in pair if cell is not None}
    return cell_ids <= searched or not cell_ids.isdisjoint(unrepeated)


def _pairs_of_walks(results: Sequence[Certificate], reference: Mapping[str, object]) -> list[tuple[Certificate, Certificate]]:
    """Return every walk that is not itself a reference with the one that equals it except on the reference's axis.

    Walks that have not ended are left out: another batch may be faster.
    """
    ended = {walk_point(result.fastest.cell): result for result in results if result.fastest and result.outcome in ENDED}
    return [
        (result, ended[counterpart])
        for result in ended.values()
        if not reference.items() <= (cell := result.batches[0].cell).items()
        if (counterpart := walk_point({**cell, **reference})) in ended
    ]


def _compare_walks(
    subject: Certificate,
    reference: Certificate,
    axis: tuple[str, ...],
    obstacle: str | None,
    criteria: Criteria,
    pairs: int,
) -> Comparison:
    assert subject.fastest is not None
    assert reference.fastest is not None
    cells = repeats(subject.fastest), repeats(reference.fastest)
    comparison = compare_pair(*cells, axis, obstacle, criteria, pairs)
    is_search = not all(map(has_repeats, (subject.fastest, reference.fastest)))
    return replace(comparison, is_search=is_search, of_walks=True)


def why_walk_diverges(result: Certificate) -> str | None:
    """Return why a walk has no ratio if one of its batches trains differently: its other batches run the same code."""
    diverged = next((summary for summary in result.batches if summary.status == DIVERGED), None)
    return None if diverged is None else f"batch {diverged.cell['batch']} is diverged: {diverged.divergence}"


def _search_of(summary: CellSummary) -> CellSummary:
    """Return a summary of the launch that searched."""
    return summary.of_launches(_SEARCH)


def repeats(summary: CellSummary) -> CellSummary:
    """Return a summary of the launches after the one that chose the batch; of that one where there is no other."""
    return summary.of_launches(_REPEATS) if has_repeats(summary) else summary


def has_repeats(summary: CellSummary) -> bool:
    """Return whether a batch of a walk has launches that did not choose it."""
    return any(record["launch"] in _REPEATS for record in summary.ok)
