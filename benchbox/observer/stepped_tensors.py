"""The stepped tensors of all ranks, and what became of their updates. Plain data without torch, as the facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .facts import RankFacts, SteppedTensor, UpdateStatistics


def all_stepped_tensors(facts: Iterable[RankFacts]) -> Iterator[tuple[int, SteppedTensor]]:
    """Yield (rank, tensor) for every stepped tensor of every rank that holds a part of it."""
    for rank_facts in facts:
        for tensor in rank_facts.stepped:
            if tensor.elements:
                yield rank_facts.rank, tensor


def edq(statistics: Iterable[UpdateStatistics]) -> float | None:
    """Return the effective descent quality <u, movement> / |u|^2 over several tensors, or None if no update was computed.

    It is 1 when every update arrives in the stored weights (Collage, arXiv:2405.03637).
    """
    statistics = list(statistics)
    squared = sum(tensor.update_squared for tensor in statistics)
    return sum(tensor.update_dot for tensor in statistics) / squared if squared else None
