"""Memory of DeepSpeed ZeRO 1 and 2 (`contiguous_gradients`, without offload)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from benchbox.theory.communication import bucket_limit
from benchbox.theory.padding import zero_group_numel
from benchbox.theory.sharding.base import FLOAT64, MemoryModel

if TYPE_CHECKING:
    from benchbox.theory.structure import CellSetup, Structure, Timeline


class Zero12Model(MemoryModel):
    """Flat replicated parameters, partitioned masters and moments.

    Both have a bucket for gradients from the first one in a backward on. ZeRO-2 moves them into it as they appear, and copies
    of what is reduced those of its own partition. ZeRO-1 keeps all gradients until backward has ended, and reduces them then.
    """

    def __init__(self, structure: Structure, timeline: Timeline, setup: CellSetup) -> None:
        super().__init__(structure, timeline, setup)
        self._padded = [
            zero_group_numel((self.numel(number) for number in numbers), setup.world_size)
            for numbers in structure.groups.values()
        ]
        self._in_bucket = 0  # elements
        self._has_copied = False  # in this micro-step
        self._shares = self._gradient_shares()
        self._copied_bytes = max(copied for copied, _ in self._shares) * setup.live_size

    @property
    def _partition_numel(self) -> int:
        return sum(self._padded) // self.setup.world_size

    def _gradient_shares(self) -> list[tuple[int, int]]:
        """Return, by rank, the elements of the gradients that it copies from the bucket, and those of its largest gradient.

        It copies whole gradients, also those that are only in part in its partition (deepspeed.runtime.zero.stage_1_and_2,
        `copy_grads_in_partition`).
        """
        copied: Counter[int] = Counter()
        largest: Counter[int] = Counter()
        for padded, numbers in zip(self._padded, self.structure.groups.values(), strict=True):
            partition, start = padded // self.setup.world_size, 0
            for number in numbers:
                end = start + self.numel(number)
                for rank in range(start // partition, (end - 1) // partition + 1):
                    copied[rank] += end - start
                    part = min(end, (rank + 1) * partition) - max(start, rank * partition)
                    largest[rank] = max(largest[rank], part)
                start = end
        return [(copied[rank], largest[rank]) for rank in range(self.setup.world_size)]

    def _store(self) -> None:
        setup, frozen = self.setup, self.structure.numel - self.structure.trained_numel
        self.ledger.add("parameters", (sum(self._padded) + frozen) * setup.live_size)
        self.ledger.add("masters", self._partition_numel * setup.stepped_size)
        self.ledger.add("moments", setup.states * self._partition_numel * setup.moment_size)

    @property
    def stepped_numel(self) -> int:
        return self._partition_numel

    def _take_gradient(self, number: int) -> None:
        size = self.numel(number) * self.setup.live_size
        if not self.ledger.current["reduction"]:
            self.ledger.add("reduction", bucket_limit(self.structure) * self.setup.live_size)
        if self.setup.backend == "zero2":
            self.ledger.pass_through("gradients", size)  # until it is moved into the bucket
            self._move_into_bucket(number)
        elif self.micro_step:
            self.ledger.pass_through("gradients", size)
        else:
            self.ledger.add("gradients", size)

    def _end_backward(self) -> None:
        if self.setup.backend == "zero1" and not self.is_boundary:
            return
        if self.setup.backend == "zero1":
            for number in (number for numbers in self.structure.groups.values() for number in numbers):
                self._move_into_bucket(number)
                self.ledger.add("gradients", -self.numel(number) * self.setup.live_size)
        self._reduce()
        if self.micro_step and self.setup.backend == "zero2":  # added to those of earlier micro-steps
            self.ledger.add("gradients", -self._copied_bytes)
        self._has_copied = False
        self.ledger.clear("reduction")

    def _move_into_bucket(self, number: int) -> None:
        numel = self.numel(number)
        if self._in_bucket and self._in_bucket + numel > bucket_limit(self.structure):
            self._reduce()
        self._in_bucket += numel

    def _reduce(self) -> None:
        """Reduce the gradients in the bucket: flattened, which copies them; then those of the partition are copied from it."""
        self.ledger.pass_through("reduction", self._in_bucket * self.setup.live_size)
        self._in_bucket = 0
        if not self._has_copied:
            self.ledger.add("gradients", self._copied_bytes)
            self._has_copied = True

    def _finish(self) -> None:
        """Step group by group: its gradients are flattened, and cast to the dtype of the masters."""
        setup, ledger = self.setup, self.ledger
        most = max(copied * setup.live_size + FLOAT64 * largest for copied, largest in self._shares)
        self._clip_by_deepspeed(most - self._copied_bytes)
        ledger.stage = "optimizer"
        for padded in self._padded:
            numel = padded // setup.world_size
            ledger.add("workspace", numel * setup.live_size)
            if setup.stepped_size != setup.live_size:
                ledger.add("workspace", numel * setup.stepped_size)
                ledger.add("workspace", -numel * setup.stepped_size)
            ledger.add("workspace", -numel * setup.live_size)
        ledger.clear("gradients")  # one tensor for all groups
