"""Order of the samples that a rank trains on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from benchbox.data.randomness import ORDER, generator

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from benchbox.data.groups import SampleGroup


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Index of a sample, and the epoch in which it is drawn."""

    epoch: int
    index: int


@dataclass(frozen=True, kw_only=True)
class MicroBatchSampler:
    """Sampler of the micro-batches of one rank: an endless sequence of seeded permutations of the samples, one per epoch.

    A step takes the next `batch * accumulation * world_size` samples of the global sequence; each rank takes a consecutive part
    of them, and each micro-step a consecutive part of the rank's. So a step has the same samples however it is split, a step
    may extend into the next epoch, and every sample occurs once per epoch.
    """

    group: SampleGroup
    batch: int
    accumulation: int
    rank: int
    world_size: int
    seed: int
    start_step: int

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Yield lists of `batch` keys without end, beginning with the first micro-step of `start_step`."""
        samples_per_rank = self.batch * self.accumulation
        step = self.start_step
        while True:
            start = (step * self.world_size + self.rank) * samples_per_rank
            for position in range(start, start + samples_per_rank, self.batch):
                yield [self.key(p) for p in range(position, position + self.batch)]
            step += 1

    def key(self, position: int) -> SampleKey:
        """Return the key at a position of the global sequence."""
        epoch, offset = divmod(position, len(self.group))
        return SampleKey(epoch, self.group.index_of(int(_permutation(len(self.group), self.seed, epoch)[offset])))


@lru_cache(maxsize=2)  # a step may extend over two epochs
def _permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    return generator(ORDER, seed, epoch).permutation(samples)
