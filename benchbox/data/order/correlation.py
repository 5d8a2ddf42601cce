"""Warning of a stream whose consecutive batches are nearly of one episode."""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from benchbox.data.order.groups import SampleGroup
    from benchbox.registry.contracts import Batch

WINDOW = 50  # micro-batches
MIN_BATCHES = 20
MAX_EXCESS = 0.3  # over chance, as a share of what chance leaves


class EpisodeCorrelation:
    """Share of pairs of samples in two consecutive micro-batches that are of one episode, against that of random samples.

    It looks at the most recent micro-batches of one rank, on the host.

    Args:
        by_chance: that share for random samples (`matches_by_chance`).
    """

    def __init__(self, by_chance: float) -> None:
        self.by_chance = by_chance
        self._batches: deque[np.ndarray] = deque(maxlen=WINDOW)

    def add(self, batch: Batch) -> None:
        """Add a micro-batch, which is in the memory of the host. Samples that a policy generated have no episodes."""
        if "episode_index" not in batch:
            return
        self._batches.append(np.stack([batch["dataset_index"].numpy(), batch["episode_index"].numpy()], axis=1))

    def matches(self) -> float:
        """Return the share of pairs that are of one episode."""
        batches = list(self._batches)
        shares = []
        for earlier, later in pairwise(batches):
            _, counts = np.unique(np.concatenate([earlier, later]), axis=0, return_counts=True)
            total = int(counts.sum())
            shares.append(float((counts * (counts - 1)).sum()) / (total * (total - 1)))
        return sum(shares) / len(shares)

    def warning(self) -> str | None:
        """Return a line with the remedy if samples are much more alike than random ones, None if not or too few were drawn."""
        if len(self._batches) < MIN_BATCHES or self.by_chance >= 1 - 1e-9:
            return None
        matches = self.matches()
        if (matches - self.by_chance) / (1 - self.by_chance) <= MAX_EXCESS:
            return None
        return (
            f"consecutive batches are nearly of one episode: {matches:.0%} of pairs of samples are of the same one, and "
            f"{self.by_chance:.0%} by chance; set order: frame_shuffle, or episode_shuffle with a larger data.buffer"
        )


def matches_by_chance(groups: Sequence[SampleGroup], episode_of: Callable[[int], Hashable]) -> float:
    """Return the probability that two random samples are of one episode.

    Args:
        episode_of: returns the episode of an index.
    """
    total = sum(group.weight for group in groups)
    shares: Counter[Hashable] = Counter()
    for group in groups:
        for start, stop in group.segments.tolist():
            shares[episode_of(start)] += group.weight / total * (stop - start) / len(group)
    return sum(share**2 for share in shares.values())
