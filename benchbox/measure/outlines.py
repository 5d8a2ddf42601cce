"""Outlines of micro-batches: what the formula of their FLOPs reads, without their images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchbox.registry.contracts import Batch

_DRAWN = "uniform"  # the numbers by which inputs are dropped


@dataclass(frozen=True, slots=True)
class BatchOutline:
    """Shapes of a micro-batch, and the values that decide which optional parts it has: masks, and numbers that drop them."""

    shapes: dict[str, tuple[torch.dtype, torch.Size]]
    values: Batch

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Return the outline of a batch. On a host it has copies, because all fields of a batch share one piece of memory."""
        values = {name: value for name, value in batch.items() if value.dtype == torch.bool or name == _DRAWN}
        return cls(
            {name: (value.dtype, value.shape) for name, value in batch.items()},
            {name: value.clone() if value.device.type == "cpu" else value for name, value in values.items()},
        )

    def batch(self, device: torch.device) -> Batch:
        """Return a batch of these shapes on a device, whose other values are zeros that take no memory."""
        values = {name: value.to(device) for name, value in self.values.items()}
        return {
            name: values[name] if name in values else torch.zeros((), dtype=dtype, device=device).expand(shape)
            for name, (dtype, shape) in self.shapes.items()
        }


class OutlinedBatches:
    """Iterator over micro-batches that keeps the outline of each one."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self.outlines: list[BatchOutline] = []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self.outlines.append(BatchOutline.of(batch))
        return batch
