"""The ranks of every cell: where each spends a step, and which one the others wait for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.stragglers import describe_ranks, find_waiting, mean_split
from benchbox.analysis.summary import label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.analysis.stragglers import Waiting
    from benchbox.analysis.summary import CellSummary

MAX_WAITS = 8  # cells whose ranks wait for the same: of more there is one sentence

NOTE = (
    "All ranks end a step together. What a rank does by itself is waiting for data, computing, and waiting for a core; at a "
    "collective it waits for the ranks that have not arrived, and for the transfer once all have."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSection:
    """Sentences on the cells in which a rank or the transfers stand out; a figure has a strip for every rank."""

    sentences: tuple[str, ...]


def rank_section(summaries: Sequence[CellSummary], axes: Sequence[str]) -> RankSection | None:
    """Return the section; None for a run without a launch whose steps were split."""
    if not any(mean_split(summary) for summary in summaries):
        return None
    sentences: list[str] = []
    waits: defaultdict[str, list[tuple[Waiting, str]]] = defaultdict(list)  # what the ranks wait for -> how much, the cell
    for summary in summaries:
        sentence, waiting, cell = describe_ranks(summary), find_waiting(summary), label(summary.cell, axes)
        if waiting and sentence == str(waiting):
            waits[waiting.awaited].append((waiting, cell))
        elif sentence:
            sentences.append(f"{cell}: {sentence}.")
    for awaited, cells in waits.items():
        sentences += [f"{cell}: {waiting}." for waiting, cell in cells] if len(cells) <= MAX_WAITS else [_range(awaited, cells)]
    return RankSection(sentences=tuple(sentences))


def _range(awaited: str, cells: Sequence[tuple[Waiting, str]]) -> str:
    """Return one sentence on the cells whose ranks wait for the same."""
    by_share = sorted(cells, key=lambda pair: pair[0].share)
    (least, _), (most, cell) = by_share[0], by_share[-1]
    shares = f"{least.share:.0%} to {most.share:.0%} of the step"
    return f"In {len(cells)} cells the ranks wait for {awaited}: {shares}, most in {cell}."
