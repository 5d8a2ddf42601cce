"""The result of a comparison in sentences. A ratio appears only together with the sentence that says what was compared."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.summary import label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.analysis.comparability import Comparison
    from benchbox.analysis.summary import CellSummary
    from benchbox.report.cell_lists import CellLists


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One pair of cells."""

    ratio: str
    sentence: str
    context: str
    evidence: str
    is_settled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """All comparisons of a run. `sentences` sum up the cards, `compared` says what pairs share.

    `refused` has a line for every reason for which cells were not compared, `refused_cells` of them in all.
    """

    sentences: tuple[str, ...]
    compared: str
    cards: tuple[Card, ...]
    refused: tuple[str, ...]
    refused_cells: int


def build_headline(
    comparisons: Sequence[Comparison],
    axes: Sequence[str],
    cell_ids: Sequence[str],
    cell_lists: CellLists,
    *,
    walks: Sequence[Comparison] = (),
) -> Headline:
    """Build the headline of a run from its comparisons.

    Args:
        comparisons: of cells.
        axes: fields that vary.
        cell_ids, cell_lists: of all cells of the run, in the same order.
        walks: comparisons of walks, each at its fastest batch.
    """
    shown = [comparison for comparison in (*walks, *comparisons) if comparison.ratio is not None]
    positions = {cell_id: position for position, cell_id in enumerate(cell_ids)}
    refused: dict[str, list[CellSummary]] = defaultdict(list)
    for comparison in (*walks, *comparisons):
        if comparison.ratio is None:
            refused[str(comparison.reason)].append(comparison.subject)

    def cells_text(summaries: Sequence[CellSummary]) -> str:
        if len(summaries) == 1:
            return label(summaries[0].cell, axes)
        return cell_lists.text([positions[summary.cell_id] for summary in summaries])

    by_pair: dict[tuple[str, str, bool], list[Comparison]] = defaultdict(list)
    for comparison in shown:
        by_pair[*_pair_names(comparison, without="batch" if comparison.of_walks else None), comparison.of_walks].append(
            comparison
        )
    return Headline(
        sentences=tuple(
            _sentence(subject, reference, pairs, where=", each at its fastest batch" if of_walks else "")
            for (subject, reference, of_walks), pairs in by_pair.items()
        ),
        compared=_compared(shown),
        cards=tuple(_card(comparison, axes) for comparison in shown),
        refused=tuple(f"{cells_text(summaries)}: {reason}" for reason, summaries in refused.items()),
        refused_cells=sum(map(len, refused.values())),
    )


def _compared(shown: Sequence[Comparison]) -> str:
    """Return what the cells of a pair share."""
    if not shown:
        return ""
    with_walks = any(comparison.of_walks for comparison in shown)
    axis = " and ".join(field for field in shown[-1].axis if not (with_walks and field == "batch"))
    fastest = ", of walks also in the batch, which is the fastest of each," if with_walks else ""
    threads = ", in the threads that a rank then has" if "world_size" in shown[-1].axis else ""
    return f"Pairs differ in {axis}{fastest}{threads} and in nothing else, requested or observed."


def _pair_names(comparison: Comparison, *, without: str | None = None) -> tuple[str, str]:
    assert comparison.reference is not None
    subject, reference = (
        " ".join(_axis_value(cell, field) for field in comparison.axis if field != without)
        for cell in (comparison.subject.cell, comparison.reference.cell)
    )
    return subject, reference


def _axis_value(cell: Mapping[str, object], field: str) -> str:
    return str(cell[field]) if field in ("backend", "policy", "recipe", "attention") else label(cell, (field,))


def _sentence(subject: str, reference: str, pairs: Sequence[Comparison], *, where: str) -> str:
    """Quote the ratios of settled pairs, and count the others."""
    ratios = [comparison.ratio for comparison in pairs if comparison.ratio is not None and comparison.is_settled]
    searches = sum(comparison.is_search for comparison in pairs)
    pairs = [comparison for comparison in pairs if not comparison.is_search]
    unsettled = len(pairs) - len(ratios)
    if not pairs:
        return f"Launches that search for a batch do not settle whether {subject} or {reference} trains faster."
    if not ratios:
        more = max((comparison.more_launches or 0 for comparison in pairs), default=0)
        remedy = f": {more} more of each cell could" if more else ""
        return f"Launches do not settle whether {subject} or {reference} trains faster{where}{remedy}."
    low, high = f"{min(ratios):.2f}x", f"{max(ratios):.2f}x"
    text = f"{subject} trains at {low if low == high else f'{low} to {high}'} the samples/s of {reference}{where}"
    if len(pairs) > 1:
        text += f"{',' if where else ''} in {len(ratios)} of {len(pairs)} pairs of cells"
    if unsettled:
        text += "; launches do not settle the rest" if unsettled > 1 else "; launches do not settle the other"
    if searches:
        text += f"; of {searches} more, launches only searched for a batch"
    return f"{text}."


def _card(comparison: Comparison, axes: Sequence[str]) -> Card:
    assert comparison.ratio is not None
    assert comparison.reference is not None
    subject, reference = _pair_names(comparison)
    shared_fields = [field for field in axes if field not in comparison.axis]
    return Card(
        ratio=f"{comparison.ratio:.2f}x",
        sentence=f"the samples/s of {reference}, by {subject}",
        context=label(comparison.subject.cell, shared_fields) if shared_fields else "",
        evidence=evidence_of(comparison),
        is_settled=comparison.is_settled,
    )


def evidence_of(comparison: Comparison) -> str:
    """Return what the launches of a pair show, with the interval of the ratio."""
    effect = comparison.effect
    assert effect is not None
    launches = f"{effect.launches[0]} against {effect.launches[1]} launches"
    if comparison.is_search:
        more = f"; {comparison.more_launches} more of each cell could" if comparison.more_launches else ""
        return f"{launches}, which searched for the batch and settle nothing{more}"
    if comparison.more_launches is not None:
        return f"{launches}: too few to settle any difference; {comparison.more_launches} more of each cell could"
    text = f"{launches}, {effect.low:.2f}x to {effect.high:.2f}x with {100 * (1 - comparison.criteria.alpha):.4g}% confidence"
    return (
        text
        + {
            "improvement": ": faster",
            "regression": ": slower",
            "neutral": f": no difference above {100 * comparison.criteria.relevant:.3g}%",
            "inconclusive": ": not settled",
        }[comparison.verdict]
    )
