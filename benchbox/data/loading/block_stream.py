"""Micro-batches of `episode_shuffle`: the blocks of one rank are loaded one after another, and samples drawn from many."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.loading.packing import PackedSamples, allocate, pack
from benchbox.data.loading.trimming import trim
from benchbox.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from benchbox.data.loading.packing import PackedField
    from benchbox.data.order.episode_shuffle import EpisodeShuffle
    from benchbox.data.order.frames import SampleKey


@dataclass(frozen=True, kw_only=True)
class RankBlocks:
    """Blocks that one rank reads, numbered in the order in which it begins them, from `start_step` on.

    The lanes of a rank are the positions of its samples in a step, and as the global lanes they take the samples of a round in
    turn: sample p of the rank is number `p % (lanes * block) // lanes` of those that lane `p % lanes` draws from its block.
    """

    order: EpisodeShuffle
    samples_per_rank: int  # in a step
    rank: int
    start_step: int

    @property
    def lanes(self) -> int:
        return self.order.lanes // self.order.samples_per_step * self.samples_per_rank

    @property
    def start(self) -> int:
        """Number of samples that this rank took before."""
        return self.start_step * self.samples_per_rank

    def number(self, position: int) -> int:
        """Return the block that sample `position` of this rank is in."""
        return position // (self.lanes * self.order.block) * self.lanes + position % self.lanes

    def tasks(self) -> Iterator[tuple[int, int]]:
        """Yield (block, rows of it that were drawn before) without end, in the order in which the blocks are first used."""
        lanes = self.lanes
        round_number, offset = divmod(self.start, lanes * self.order.block)
        turn, lane = divmod(offset, lanes)
        first = round_number * lanes
        yield from ((first + i, turn) for i in range(lane, lanes))
        if turn + 1 < self.order.block:
            yield from ((first + i, turn + 1) for i in range(lane))
        number = first + lanes
        while True:
            yield number, 0
            number += 1

    def rows(self, number: int, drawn: int) -> list[int]:
        """Return the rows of a block that are not drawn yet, in the order in which they are drawn."""
        return self.order.rows(self._global_number(number))[drawn:]

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Yield the keys of the rows of `tasks`, in the order of the rows. It is the sampler of the loader of blocks."""
        for number, drawn in self.tasks():
            keys = self.order.block_keys(self._global_number(number))
            yield [keys[row] for row in sorted(self.rows(number, drawn))]

    def _global_number(self, number: int) -> int:
        turn, slot = divmod(number, self.samples_per_rank)
        return turn * self.order.samples_per_step + self.rank * self.samples_per_rank + slot


class SampleBuffer:
    """Samples in memory that is allocated once. A sample leaves when it is taken."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity))
        self._fields: tuple[PackedField, ...] = ()
        self._rows: list[np.ndarray] = []  # of every field (capacity, bytes of a sample) uint8

    def __len__(self) -> int:
        return self.capacity - len(self._free)

    def add(self, packed: PackedSamples) -> list[int]:
        """Copy samples into the buffer, and return the slots that they have.

        Raises:
            ConfigurationError: they have not the fields and shapes of the samples before.
        """
        if not self._rows:
            self._fields = packed.fields
            self._rows = [np.empty((self.capacity, field.bytes_per_sample), np.uint8) for field in packed.fields]
        if packed.fields != self._fields:
            raise ConfigurationError("the samples differ in their fields or shapes: order episode_shuffle cannot mix them")
        slots = [self._free.pop() for _ in range(packed.samples)]
        for rows, values in zip(self._rows, packed.rows(), strict=True):
            rows[slots] = values
        return slots

    def take(self, slots: Sequence[int], *, pinned: bool = False) -> PackedSamples:
        """Return the samples in these slots, which are free afterwards."""
        packed = allocate(self._fields, len(slots), pinned=pinned)
        for rows, values in zip(self._rows, packed.rows(), strict=True):
            np.take(rows, slots, axis=0, out=values, mode="clip")  # the default mode copies once more
        self._free.extend(slots)
        return packed


class BlockBatches:
    """Endless iterator of the micro-batches of a rank, made from its blocks.

    Blocks that the next micro-batch needs are loaded before it. Beyond them, the next blocks are loaded as fast as samples
    leave the buffer. So loading is spread evenly over the steps, and the buffer stays at the samples of one round.

    Args:
        load_block: returns the rows of the next block of `blocks`.
        trimmable: parts of a micro-batch without the padding that all its samples share.
    """

    def __init__(
        self,
        blocks: RankBlocks,
        load_block: Callable[[], PackedSamples],
        *,
        batch: int,
        pinned: bool,
        trimmable: Collection[str] = (),
    ) -> None:
        self.buffer = SampleBuffer(blocks.lanes * blocks.order.block)
        self._blocks = blocks
        self._tasks = blocks.tasks()
        self._load_block = load_block
        self._batch = batch
        self._pinned = pinned
        self._trimmable = trimmable
        self._position = blocks.start
        self._slots: dict[int, deque[int]] = {}  # of the rows of a block that are still in the buffer, as they are drawn

    def __iter__(self) -> BlockBatches:
        return self

    def __next__(self) -> PackedSamples:
        numbers = [self._blocks.number(p) for p in range(self._position, self._position + self._batch)]
        for number in numbers:
            while number not in self._slots:
                self._load_next()
        block = self._blocks.order.block
        for _ in range(2 + self._batch // block):  # a few, so that the first step does not wait for a full buffer
            if len(self.buffer) + block <= self.buffer.capacity:
                self._load_next()
        slots = [self._slots[number].popleft() for number in numbers]
        for number in numbers:
            if not self._slots[number]:
                del self._slots[number]
        self._position += self._batch
        if not self._trimmable:
            return self.buffer.take(slots, pinned=self._pinned)
        return pack(trim([self.buffer.take(slots).unpack()], self._trimmable), pinned=self._pinned)

    def _load_next(self) -> None:
        number, drawn = next(self._tasks)
        rows = self._blocks.rows(number, drawn)
        slots = dict(zip(sorted(rows), self.buffer.add(self._load_block()), strict=True))
        self._slots[number] = deque(slots[row] for row in rows)
