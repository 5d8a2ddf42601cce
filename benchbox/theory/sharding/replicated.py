"""Memory of a single process and of DDP: everything is replicated, and a recipe with masters has `MasterWeightOptimizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.theory.sharding.base import MemoryModel

if TYPE_CHECKING:
    from collections.abc import Iterable

# benchbox.optim.chunks: elements of a bucket of upcast gradients
_BUCKET = {"cpu": 2**20, "cuda": 2**22}
_FLOAT32 = 4


def scratch_numel(groups: Iterable[Iterable[int]], limit: int) -> int:
    """Return the elements of the buffer for upcast gradients: those of the fullest bucket of any group.

    A parameter larger than a bucket is stepped in chunks of a bucket. A bucket is closed before the chunk that would overflow
    it.
    """
    largest = 0
    for numels in groups:
        current = 0
        for numel in numels:
            chunks = [limit] * (numel // limit) + ([numel % limit] if numel % limit else [])
            for chunk in chunks:
                current = chunk if current + chunk > limit else current + chunk
                largest = max(largest, current)
    return largest


class SingleModel(MemoryModel):
    """Parameters, masters, moments and gradients, all whole. Gradients appear as backward completes them."""

    def _store(self) -> None:
        setup, trained = self.setup, self.structure.trained_numel
        self.ledger.add("parameters", self.structure.numel * setup.live_size)
        self.ledger.add("moments", setup.states * trained * setup.moment_size)
        if setup.masters:
            self.ledger.add("masters", trained * _FLOAT32)
            groups = [[self.numel(number) for number in numbers] for numbers in self.structure.groups.values()]
            self.ledger.add("workspace", _FLOAT32 * scratch_numel(groups, _BUCKET[setup.device]))

    @property
    def stepped_numel(self) -> int:
        return self.structure.trained_numel

    def _take_gradient(self, number: int) -> None:
        size = self.numel(number) * self.setup.live_size
        if self.micro_step == 0:
            self.ledger.add("gradients", size)
        else:  # added to the one that is there
            self.ledger.pass_through("gradients", size)

    def _finish(self) -> None:
        numels = (self.numel(number) for number in self.structure.trained)
        self._clip(numels, is_bfloat16=self.setup.live_size == 2)
        self.ledger.stage = "optimizer"


class DdpModel(SingleModel):
    """Memory of a single process, except that reduced gradients are views into buckets, which stay from step to step.

    Micro-steps before the last one reduce nothing (`no_sync`), and add up their gradients beside the buckets. In the last one
    each sum is copied into its bucket, and freed, as soon as it is complete.
    """

    def _store(self) -> None:
        super()._store()
        self.ledger.add("reduction", self.structure.trained_numel * self.setup.live_size)

    def _take_gradient(self, number: int) -> None:
        if not self.is_boundary:
            super()._take_gradient(number)
            return
        size = self.numel(number) * self.setup.live_size
        self.ledger.pass_through("gradients", size)  # until it is copied into its bucket, or added to the sum
        if self.micro_step > 0:
            self.ledger.add("gradients", -size)
