"""Memory of FSDP2 (torch.distributed.fsdp.fully_shard), on one mesh dimension and on two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.theory.padding import fsdp2_shard_numel
from benchbox.theory.sharding.base import MemoryModel
from benchbox.theory.structure import ROOT

if TYPE_CHECKING:
    from benchbox.theory.structure import CellSetup, Structure, Timeline


class Fsdp2Model(MemoryModel):
    """Shards by rows; a buffer for each all-gather, out of which the parameters are copied; a buffer for each reduction.

    In forward the buffer of a unit stays until the next unit has its own (`AllGatherState`). The input of a reduce-scatter
    stays until the next one begins (`ReduceScatterState`).
    """

    def __init__(self, structure: Structure, timeline: Timeline, setup: CellSetup) -> None:
        super().__init__(structure, timeline, setup)
        self._units = structure.units("fsdp2_unit")
        self._unit_of = {number: name for name, numbers in self._units.items() for number in numbers}
        expected = set(timeline.gradients)
        self._expected = {name: [n for n in numbers if n in expected] for name, numbers in self._units.items()}
        self._left = [event.name for event in timeline.events if event.kind == "leave" and event.name in self._units]
        self._gathered: set[str] = set()
        self._prefetched: set[str] = set()
        self._kept_gather = self._kept_reduction = 0
        self._pending: dict[str, list[int]] = {}
        self._accumulated: set[int] = set()

    def _shard(self, number: int) -> int:
        return fsdp2_shard_numel(self.structure.parameters[number].shape, self.setup.shards)

    def _whole_bytes(self, numbers: list[int]) -> int:
        return self.setup.shards * sum(map(self._shard, numbers)) * self.setup.live_size

    def _store(self) -> None:
        setup = self.setup
        for number, parameter in enumerate(self.structure.parameters):
            self.ledger.add("parameters", self._shard(number) * (setup.stepped_size if parameter.trains else setup.live_size))
        self.ledger.add("moments", setup.states * self.stepped_numel * setup.moment_size)

    @property
    def stepped_numel(self) -> int:
        return sum(map(self._shard, self.structure.trained))

    def _begin_forward(self) -> None:
        self._pending = {name: [] for name in self._units}
        self._gather(ROOT, in_forward=True)

    def _gather(self, name: str, *, in_forward: bool) -> None:
        """Gather the parameters of a unit, and copy them out."""
        if name in self._gathered or name not in self._units:
            return
        size = self._whole_bytes(self._units[name])
        if name in self._prefetched:
            self._prefetched.remove(name)
        else:
            self._start_gather(name)
        self._gathered.add(name)
        if in_forward:
            self.ledger.add("all_gather", -self._kept_gather)
            self._kept_gather = size
        self.ledger.add("all_gather", size)  # the parameters, copied out of the buffer
        if not in_forward:
            self.ledger.add("all_gather", -size)

    def _start_gather(self, name: str) -> None:
        self.ledger.add("all_gather", self._whole_bytes(self._units[name]))

    def _release(self, name: str) -> None:
        if name in self._gathered:
            self._gathered.remove(name)
            self.ledger.add("all_gather", -self._whole_bytes(self._units[name]))

    def _enter(self, name: str) -> None:
        self._gather(name, in_forward=True)

    def _leave(self, name: str) -> None:
        if name != ROOT:
            self._release(name)

    def _end_forward(self) -> None:
        self.ledger.add("all_gather", -self._kept_gather)
        self._kept_gather = 0

    def _enter_backward(self, name: str) -> None:
        if name not in self._units:
            return
        self._gather(name, in_forward=False)
        before = self._left[: self._left.index(name)]
        if before and before[-1] not in self._gathered | self._prefetched:
            self._prefetched.add(before[-1])
            self._start_gather(before[-1])

    def _take_gradient(self, number: int) -> None:
        name = self._unit_of[number]
        self._pending[name].append(number)
        size = self.numel(number) * self.setup.live_size
        if number in self._accumulated:  # added to the one that is there
            self.ledger.pass_through("gradients", size)
        else:
            self.ledger.add("gradients", size)
        if len(self._pending[name]) == len(self._expected[name]):
            self._reduce(name)

    def _reduce(self, name: str) -> None:
        """Reshard a unit; if this micro-step reduces, copy its gradients into one buffer, reduce and cast them."""
        setup, ledger, numbers = self.setup, self.ledger, self._expected[name]
        self._release(name)
        if not self.is_boundary:
            self._accumulated |= set(numbers)
            return
        ledger.add("reduction", -self._kept_reduction)
        self._kept_reduction = self._whole_bytes(numbers)
        ledger.add("reduction", self._kept_reduction)
        for number in numbers:
            ledger.add("gradients", -self.numel(number) * setup.live_size)
        self._accumulated -= set(numbers)
        shard = sum(map(self._shard, numbers))
        ledger.add("reduction", shard * setup.live_size)
        self._scatter(self._kept_reduction)
        ledger.add("gradients", shard * setup.stepped_size)
        if setup.stepped_size != setup.live_size:
            ledger.add("reduction", -shard * setup.live_size)
        else:  # what was reduced is the gradient
            ledger.current["reduction"] -= shard * setup.live_size
            ledger.total -= shard * setup.live_size

    def _end_backward(self) -> None:
        for name in list(self._gathered):
            self._release(name)
        for name in list(self._prefetched):
            self._prefetched.remove(name)
            self.ledger.add("all_gather", -self._whole_bytes(self._units[name]))
        self.ledger.add("reduction", -self._kept_reduction)
        self._kept_reduction = 0

    def _finish(self) -> None:
        self._clip(map(self._shard, self.structure.trained), is_bfloat16=self.setup.stepped_size == 2)
        self.ledger.stage = "optimizer"
