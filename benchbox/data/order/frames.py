"""Orders of samples: functions of the position in the endless sequence that all ranks read together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from benchbox.data.order.interleaving import Interleaving
from benchbox.data.order.randomness import ORDER, generator
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from benchbox.data.order.groups import SampleGroup


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Index of a sample, and the epoch in which it is drawn."""

    epoch: int
    index: int

    def __reduce__(self) -> tuple[type[SampleKey], tuple[int, int]]:
        """Pickle faster than a data class by itself does: workers receive many."""
        return SampleKey, (self.epoch, self.index)


class Order(Protocol):
    """Order of samples. Every sample of a group occurs once per epoch of the group."""

    def key(self, position: int) -> SampleKey:
        """Return the key at a position of the global sequence."""


class FrameOrder:
    """Order by frames: a seeded permutation of the samples of a group per epoch, or their stored order.

    Args:
        groups: they are interleaved by their weights.
        shuffled: False keeps the stored order, in which consecutive samples are nearly equal.

    Raises:
        ConfigurationError: a weight is not a positive number, or is too small next to the others.
        DataError: a group has no samples.
    """

    def __init__(self, groups: Sequence[SampleGroup], seed: int, *, shuffled: bool = True) -> None:
        check_groups(groups)
        self._groups = groups
        self._seed = seed
        self._shuffled = shuffled
        self._interleaving = Interleaving([group.weight for group in groups], seed)
        self._permutation = lru_cache(maxsize=2 * len(groups))(self._permute)  # a step may extend over two epochs

    def key(self, position: int) -> SampleKey:
        """Return the key at a position of the global sequence."""
        number, unit = self._interleaving.locate(position)
        group = self._groups[number]
        epoch, offset = divmod(unit, len(group))
        if self._shuffled:
            offset = int(self._permutation(number, epoch)[offset])
        return SampleKey(epoch, group.index_of(offset))

    def _permute(self, number: int, epoch: int) -> np.ndarray:
        # Group 0 has the permutations of a dataset without others: trailing zeros of a key leave the generator unchanged.
        return generator(ORDER, self._seed, epoch, number).permutation(len(self._groups[number]))


def check_groups(groups: Sequence[SampleGroup]) -> None:
    """Raise DataError for a group without samples."""
    for number, group in enumerate(groups):
        if not len(group):
            raise DataError("the dataset has no frames" if len(groups) == 1 else f"dataset {number} has no frames")


@dataclass(frozen=True, kw_only=True)
class MicroBatchSampler:
    """Sampler of the micro-batches of one rank.

    A step takes the next `batch * accumulation * world_size` samples of the global sequence; each rank takes a consecutive part
    of them, and each micro-step a consecutive part of the rank's. So a step has the same samples however it is split, and a
    step may extend into the next epoch.
    """

    order: Order
    batch: int
    accumulation: int
    rank: int
    world_size: int
    start_step: int

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Yield lists of `batch` keys without end, beginning with the first micro-step of `start_step`."""
        samples_per_rank = self.batch * self.accumulation
        step = self.start_step
        while True:
            start = (step * self.world_size + self.rank) * samples_per_rank
            for position in range(start, start + samples_per_rank, self.batch):
                yield [self.order.key(p) for p in range(position, position + self.batch)]
            step += 1
