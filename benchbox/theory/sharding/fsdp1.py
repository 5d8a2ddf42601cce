"""Memory of FSDP1 (torch.distributed.fsdp, `use_orig_params`, `BACKWARD_PRE`), in all four strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.theory.padding import fsdp1_flat_numel
from benchbox.theory.sharding.base import MemoryModel
from benchbox.theory.structure import ROOT, entered_in_backward

if TYPE_CHECKING:
    from benchbox.theory.structure import CellSetup, Structure, Timeline


class Fsdp1Model(MemoryModel):
    """Flat shards; the flat parameters of a unit while it is gathered; its flat gradient until that is reduced."""

    def __init__(self, structure: Structure, timeline: Timeline, setup: CellSetup) -> None:
        super().__init__(structure, timeline, setup)
        self._units = structure.units("fsdp1_unit")
        self._unit_of = {number: name for name, numbers in self._units.items() for number in numbers}
        self._flat = {
            name: fsdp1_flat_numel((self.numel(number) for number in numbers), setup.shards, setup.live_size)
            for name, numbers in self._units.items()
        }
        expected = set(timeline.gradients)
        self._expected = {name: [n for n in numbers if n in expected] for name, numbers in self._units.items()}
        entered = [event.name for event in timeline.events if event.kind == "enter" and event.name in self._units]
        needed = entered_in_backward(timeline)
        self._order = [name for name in entered if name in needed]  # of the units that backward enters, as forward did
        self._keeps = setup.backend.endswith("grad_op")
        self._gathered: set[str] = set()
        self._pending: dict[str, list[int]] = {}
        self._accumulated: set[str] = set()

    def _trains(self, name: str) -> bool:
        return bool(self._expected[name])

    def _store(self) -> None:
        setup = self.setup
        for name, numel in self._flat.items():
            trains = any(self.structure.parameters[number].trains for number in self._units[name])
            size = setup.stepped_size if trains else setup.live_size
            self.ledger.add("parameters", numel // setup.shards * size)
        self.ledger.add("moments", setup.states * self.stepped_numel * setup.moment_size)

    @property
    def stepped_numel(self) -> int:
        return sum(numel // self.setup.shards for name, numel in self._flat.items() if self._trains(name))

    def _begin_forward(self) -> None:
        self._pending = {name: [] for name in self._units}
        if ROOT in self._units:
            self._gather(ROOT)

    def _gather(self, name: str) -> None:
        if name in self._gathered or name not in self._units:
            return
        self._gathered.add(name)
        setup, numel = self.setup, self._flat[name]
        casts = self._trains(name) and setup.stepped_size != setup.live_size
        shard = numel // setup.shards * setup.live_size if casts else 0  # in the dtype that is gathered
        self.ledger.add("all_gather", shard + numel * setup.live_size)
        self.ledger.add("all_gather", -shard)

    def _release(self, name: str) -> None:
        if name in self._gathered:
            self._gathered.remove(name)
            self.ledger.add("all_gather", -self._flat[name] * self.setup.live_size)

    def _enter(self, name: str) -> None:
        self._gather(name)

    def _leave(self, name: str) -> None:
        if not self._keeps and name != ROOT:
            self._release(name)

    def _enter_again(self, name: str) -> None:
        if name in self._units and name not in self._gathered:
            self._gather(name)
            self._release(name)

    def _enter_backward(self, name: str) -> None:
        if name not in self._units:
            return
        self._gather(name)
        if name in self._order:
            before = self._order[: self._order.index(name)]
            if before:
                self._gather(before[-1])  # the one that backward enters next

    def _take_gradient(self, number: int) -> None:
        name = self._unit_of[number]
        self._pending[name].append(number)
        self.ledger.add("gradients", self.numel(number) * self.setup.live_size)
        if len(self._pending[name]) == len(self._expected[name]):
            self._reduce(name)

    def _reduce(self, name: str) -> None:
        """Concatenate the gradients of a unit, and reduce and cast them if this micro-step reduces."""
        setup, ledger = self.setup, self.ledger
        flat = self._flat[name] * setup.live_size
        ledger.add("reduction", flat)
        for number in self._pending[name]:
            ledger.add("gradients", -self.numel(number) * setup.live_size)
        if not self.is_boundary:
            if not self._keeps:
                self._release(name)
            if name in self._accumulated:
                ledger.add("reduction", -flat)
            self._accumulated.add(name)
            return
        if not (name == ROOT and self._keeps):
            self._release(name)
        reduced = flat // setup.shards
        ledger.add("reduction", reduced)
        if setup.stepped_size == setup.live_size:
            ledger.add("gradients", reduced)
            ledger.add("reduction", -reduced)
        else:
            ledger.add("gradients", self._flat[name] // setup.shards * setup.stepped_size)
            ledger.add("reduction", -reduced)
        ledger.add("reduction", -flat * (1 + (name in self._accumulated)))
        self._accumulated.discard(name)

    def _end_backward(self) -> None:
        for name in list(self._gathered):
            if self.is_boundary or not self._keeps:
                self._release(name)

    def _finish(self) -> None:
        shards = [self._flat[name] // self.setup.shards for name in self._units if self._trains(name)]
        self._clip(shards, is_bfloat16=self.setup.stepped_size == 2)
        self.ledger.stage = "optimizer"
