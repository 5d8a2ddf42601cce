"""Memory of DeepSpeed ZeRO 3 (`contiguous_gradients`, without offload)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.theory.communication import bucket_limit
from benchbox.theory.padding import round_up
from benchbox.theory.sharding.base import FLOAT64, MemoryModel
from benchbox.theory.zero3 import fetch_parameters, partitioned_numel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.theory.structure import CellSetup, Structure, Timeline


class Zero3Model(MemoryModel):
    """Partitioned parameters, masters, moments and gradients; parameters that are fetched are whole until they are released.

    A parameter that is gathered alone stays in the buffer of its all-gather. Of several, each is copied from their buffer when
    the first of them is awaited, and the buffer stays until the last is (`AllGatherCoalescedHandle`).
    """

    def __init__(self, structure: Structure, timeline: Timeline, setup: CellSetup) -> None:
        super().__init__(structure, timeline, setup)
        # of several micro-steps the last, like the timeline
        self._micro_step = fetch_parameters(structure, timeline, setup.accumulation)[-1]
        self._fetches = iter(self._micro_step.fetches)
        self._whole: dict[int, int] = {}  # bytes of each parameter that is
        self._buffers: dict[int, _Buffer] = {}  # of the parameters that are not awaited yet

    def _store(self) -> None:
        setup, structure = self.setup, self.structure
        stepped = self.stepped_numel
        self.ledger.add("parameters", self._partitions(range(len(structure.parameters))) * setup.live_size)
        self.ledger.add("masters", stepped * setup.stepped_size)
        self.ledger.add("moments", setup.states * stepped * setup.moment_size)
        self.ledger.add("gradients", stepped * setup.live_size)
        self.ledger.add("reduction", bucket_limit(structure) * setup.live_size)

    @property
    def stepped_numel(self) -> int:
        return self._partitions(self.structure.trained)

    def _partitions(self, numbers: Iterable[int]) -> int:
        shards = self.setup.world_size
        return sum(partitioned_numel(self.structure.parameters[number], shards) // shards for number in numbers)

    def _begin_forward(self) -> None:
        self._hold(self._micro_step.before)
        self._fetches = iter(self._micro_step.fetches)

    def _hold(self, numbers: Iterable[int]) -> None:
        """Hold these parameters and no others: each was gathered alone."""
        self.ledger.clear("all_gather")
        self._buffers.clear()
        self._whole = {number: self._gathered_bytes((number,)) for number in numbers}
        self.ledger.add("all_gather", sum(self._whole.values()))

    def _use(self) -> None:
        fetch = next(self._fetches)
        self._release(fetch.released)
        self._gather(fetch.gathered)
        self._await(fetch.awaited)
        self._gather(fetch.prefetched)

    def _gather(self, numbers: tuple[int, ...]) -> None:
        if not numbers:
            return
        size = self._gathered_bytes(numbers)
        self.ledger.add("all_gather", size)
        if len(numbers) == 1:
            self._whole[numbers[0]] = size
        else:
            self._buffers |= dict.fromkeys(numbers, _Buffer(size, set(numbers)))

    def _await(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            buffer = self._buffers.pop(number, None)
            if buffer is None:
                continue
            if number not in self._whole:
                for copied in buffer.pending:
                    self._whole[copied] = self.numel(copied) * self.setup.live_size
                    self.ledger.add("all_gather", self._whole[copied])
            buffer.pending.discard(number)
            if not buffer.pending:
                self.ledger.add("all_gather", -buffer.size)

    def _release(self, numbers: tuple[int, ...]) -> None:
        self._await(numbers)  # what no module has used is awaited first
        for number in numbers:
            self.ledger.add("all_gather", -self._whole.pop(number))

    def _gathered_bytes(self, numbers: Iterable[int]) -> int:
        parameters = self.structure.parameters
        return sum(partitioned_numel(parameters[number], self.setup.world_size) for number in numbers) * self.setup.live_size

    def _take_gradient(self, number: int) -> None:
        self.ledger.pass_through("gradients", self.numel(number) * self.setup.live_size)

    def _end_backward(self) -> None:
        shards, parameters = self.setup.world_size, self.structure.parameters
        trained = sum(partitioned_numel(parameters[number], shards) for number in self.structure.trained)
        size = min(trained, round_up(bucket_limit(self.structure), shards)) * self.setup.live_size
        self.ledger.add("reduction", size)  # what is scattered, and holds the result
        self._scatter(size)
        self.ledger.add("reduction", -size)
        self._hold(self._micro_step.after)

    def _finish(self) -> None:
        setup = self.setup
        self._clip_by_deepspeed(FLOAT64 * max((self._partitions([number]) for number in self.structure.trained), default=0))
        self.ledger.stage = "optimizer"
        for numbers in self.structure.groups.values():
            self.ledger.pass_through("workspace", self._partitions(numbers) * setup.stepped_size)


@dataclass(slots=True)
class _Buffer:
    """Buffer of an all-gather of several parameters."""

    size: int
    pending: set[int]  # parameters that are not awaited yet
