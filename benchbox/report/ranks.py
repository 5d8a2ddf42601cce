"""The ranks of every cell: where each spends a step, and which one the others wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.stragglers import describe_ranks, mean_split
from benchbox.analysis.summary import label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.analysis.summary import CellSummary

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
    described = [(summary, sentence) for summary in summaries if (sentence := describe_ranks(summary))]
    return RankSection(sentences=tuple(f"{label(summary.cell, axes)}: {sentence}." for summary, sentence in described))
