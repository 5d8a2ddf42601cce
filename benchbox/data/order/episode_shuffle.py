"""Order by episodes: blocks of consecutive frames, of which many are drawn from at the same time."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.order.frames import SampleKey, check_groups
from benchbox.data.order.interleaving import Interleaving
from benchbox.data.order.randomness import BLOCKS, ROWS, TAILS, generator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.data.order.groups import SampleGroup


class EpisodeShuffle:
    """Order that draws from `lanes` blocks side by side. Each of them is read forward, by one rank only.

    The sequence is cut into rounds of `lanes * block` samples. Lane i of round g has block `g * lanes + i`, and consecutive
    positions are consecutive lanes. `lanes` is a multiple of the samples of a step, so a step has samples of that many blocks,
    and position j of a step always belongs to the same lanes. The order depends on the samples of a step, and on neither ranks
    nor accumulation.

    The rows of a block are drawn in an order of its own. All lanes begin a block in the same step: if they went forward
    together, a step would have the same phase of every episode, and gradients would drift with it.

    Args:
        groups: their blocks are interleaved by the weights of the groups.
        samples_per_step: of all ranks together.
        block: consecutive samples of an episode that are read together.
        buffer: samples in a round, rounded to a multiple of `samples_per_step * block`.

    Raises:
        ConfigurationError: a weight is not a positive number, or is too small next to the others.
        DataError: a group has no samples.
    """

    def __init__(self, groups: Sequence[SampleGroup], seed: int, *, samples_per_step: int, block: int, buffer: int) -> None:
        check_groups(groups)
        self.block = block
        self.samples_per_step = samples_per_step
        self.lanes = samples_per_step * max(1, round(buffer / (block * samples_per_step)))
        self._groups = [GroupBlocks(group, number, seed, block) for number, group in enumerate(groups)]
        self._interleaving = Interleaving([group.weight for group in groups], seed)
        self._seed = seed
        self._drawn_block = lru_cache(maxsize=self.lanes)(self._draw_block)

    def key(self, position: int) -> SampleKey:
        """Return the key at a position of the global sequence."""
        round_number, offset = divmod(position, self.lanes * self.block)
        turn, lane = divmod(offset, self.lanes)
        return self._drawn_block(round_number * self.lanes + lane)[turn]

    def rows(self, number: int) -> list[int]:
        """Return the rows (block,) of block `number` of the sequence in the order in which they are drawn."""
        return [int(row) for row in generator(ROWS, self._seed, number).permutation(self.block)]

    def _draw_block(self, number: int) -> list[SampleKey]:
        keys = self.block_keys(number)
        return [keys[row] for row in self.rows(number)]

    def block_keys(self, number: int) -> list[SampleKey]:
        """Return the keys (block,) of block `number` of the sequence, in the order in which they are read: forward."""
        group, unit = self._interleaving.locate(number)
        return self._groups[group].keys(unit)


class GroupBlocks:
    """Endless sequence of the blocks of one group, shuffled per epoch. All have the same size.

    Blocks are counted from the start of an episode's segment, where videos have a key frame. The frames left over at the ends
    of segments, in an order that is shuffled per epoch and continues over epochs, are cut into blocks too: these have frames of
    several episodes. Epoch e has all complete blocks, and those blocks of the rest that begin in it.
    """

    def __init__(self, group: SampleGroup, number: int, seed: int, size: int) -> None:
        self._key = seed, number
        self._size = size
        self._starts = group.segments[:, 0]
        lengths = group.segments[:, 1] - self._starts
        self._block_ends = np.cumsum(lengths // size)  # complete blocks up to the end of a segment
        tails = lengths % size
        self._tails = np.stack([group.segments[:, 1] - tails, tails], axis=1)[tails > 0]  # (tails, 2): start, frames
        self._complete = int(self._block_ends[-1])
        self._frames = len(group)
        self._tail_frames = int(tails.sum())
        self._permutation = lru_cache(maxsize=2)(self._permute_blocks)
        self._tail_order = lru_cache(maxsize=2)(self._permute_tails)

    def keys(self, number: int) -> list[SampleKey]:
        """Return the keys of block `number` of the sequence."""
        epoch = number * self._size // self._frames  # the last one of which the first block is not after this one
        block = int(self._permutation(epoch)[number - self._blocks_before(epoch)])
        if block >= self._complete:
            return list(self._tail_keys(self._tail_blocks_before(epoch) + block - self._complete))
        segment = int(np.searchsorted(self._block_ends, block, side="right"))
        stop = int(self._starts[segment] + self._size * (self._complete_up_to(segment, block) + 1))
        return [SampleKey(epoch, index) for index in range(stop - self._size, stop)]

    def _complete_up_to(self, segment: int, block: int) -> int:
        """Return how many complete blocks of a segment are before a complete block of it."""
        return block - (int(self._block_ends[segment - 1]) if segment else 0)

    def _blocks_before(self, epoch: int) -> int:
        return epoch * self._complete + self._tail_blocks_before(epoch)

    def _tail_blocks_before(self, epoch: int) -> int:
        return -(-epoch * self._tail_frames // self._size)

    def _tail_keys(self, number: int) -> Iterator[SampleKey]:
        """Yield the keys of block `number` of the tails."""
        position, missing = number * self._size, self._size
        while missing:
            epoch, offset = divmod(position, self._tail_frames)
            order, ends = self._tail_order(epoch)
            tail = int(np.searchsorted(ends, offset, side="right"))
            stop = int(self._tails[order[tail]].sum())
            start = stop - (int(ends[tail]) - offset)
            count = min(missing, stop - start)
            yield from (SampleKey(epoch, index) for index in range(start, start + count))
            position, missing = position + count, missing - count

    def _permute_blocks(self, epoch: int) -> np.ndarray:
        seed, number = self._key
        return generator(BLOCKS, seed, epoch, number).permutation(self._blocks_before(epoch + 1) - self._blocks_before(epoch))

    def _permute_tails(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the tails in an epoch, and the number of frames up to the end of each."""
        seed, number = self._key
        order = generator(TAILS, seed, epoch, number).permutation(len(self._tails))
        return order, np.cumsum(self._tails[order, 1])
