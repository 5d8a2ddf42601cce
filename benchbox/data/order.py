"""Which samples a rank takes, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from benchbox.data.randomness import ORDER, generator

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


@dataclass(frozen=True, slots=True)
class Key:
    """A sample, and the epoch it is drawn in."""

    epoch: int
    index: int


@dataclass(frozen=True, kw_only=True)
class Order:
    """The micro-batches of one rank: an endless, seeded permutation of the samples, one permutation an epoch.

    A step takes the next `batch * accumulation * world_size` samples of that one sequence, ranks take consecutive parts of
    it and micro-steps consecutive parts of those. So a step consumes the same samples however it is split, an epoch that
    does not divide runs on into the next one, and every sample is seen once an epoch.
    """

    samples: int
    batch: int
    accumulation: int
    rank: int
    world_size: int
    seed: int
    start_step: int

    def __iter__(self) -> Iterator[list[Key]]:
        """Lists of `batch` keys, without end, from the first micro-step of `start_step`."""
        own = self.batch * self.accumulation
        step = self.start_step
        while True:
            first = (step * self.world_size + self.rank) * own
            for position in range(first, first + own, self.batch):
                yield [self.key(p) for p in range(position, position + self.batch)]
            step += 1

    def key(self, position: int) -> Key:
        """The sample at a place of the global sequence."""
        epoch, place = divmod(position, self.samples)
        return Key(epoch, int(_permutation(self.samples, self.seed, epoch)[place]))


@lru_cache(maxsize=2)  # a step may lie across two epochs
def _permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    return generator(ORDER, seed, epoch).permutation(samples)
