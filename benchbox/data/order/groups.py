"""Groups of samples, which an order draws from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class SampleGroup:
    """Samples that are drawn in an order of their own: each once per epoch of the group.

    Args:
        segments: (segments, 2) int64, the index of the first of consecutive frames of an episode, and the index past the last.
        weight: share of drawn samples that are of this group, relative to the weights of other groups.
    """

    segments: np.ndarray
    weight: float = 1.0

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def index_of(self, number: int) -> int:
        """Return the index of sample `number`, counted from 0 over the segments in their order."""
        segment = int(np.searchsorted(self._ends, number, side="right"))
        return int(self.segments[segment, 1] - (self._ends[segment] - number))

    @cached_property
    def _ends(self) -> np.ndarray:
        """Number of samples up to the end of each segment (segments,)."""
        return np.cumsum(self.segments[:, 1] - self.segments[:, 0])


def generated_group(samples: int) -> SampleGroup:
    """Return a group in which every sample is an episode of its own."""
    indices = np.arange(samples, dtype=np.int64)
    return SampleGroup(np.stack([indices, indices + 1], axis=1))
