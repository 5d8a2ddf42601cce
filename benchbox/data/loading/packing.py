"""Samples in one piece of memory, which passes from a worker to the main process without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from benchbox.registry.contracts import Batch

ALIGNMENT = 64  # bytes, at which every field begins


class PackedField(NamedTuple):
    """Field of a sample: a tensor of this dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes_per_sample: int


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Samples whose fields follow one another in `memory` (bytes,) uint8, every one with the samples as its first dimension."""

    memory: Tensor
    fields: tuple[PackedField, ...]
    samples: int

    def unpack(self) -> Batch:
        """Return the fields as tensors (samples, ...) that share the memory."""
        sizes = [field.bytes_per_sample * self.samples for field in self.fields]
        parts = self.memory.split([part for size in sizes for part in (size, _aligned(size) - size)])[::2]
        return {
            field.name: part.view(field.dtype).view(self.samples, *field.shape)
            for field, part in zip(self.fields, parts, strict=True)
        }

    def rows(self) -> list[np.ndarray]:
        """Return the fields as bytes (samples, bytes of a sample) uint8 that share the memory."""
        memory, rows, start = self.memory.numpy(), [], 0
        for field in self.fields:
            size = field.bytes_per_sample * self.samples
            rows.append(memory[start : start + size].reshape(self.samples, -1))
            start += _aligned(size)
        return rows

    def pin_memory(self) -> PackedSamples:
        """Return a copy in page-locked memory. The loader calls it where there is a CUDA device."""
        return PackedSamples(self.memory.pin_memory(), self.fields, self.samples)


def allocate(fields: tuple[PackedField, ...], samples: int, *, pinned: bool = False) -> PackedSamples:
    """Allocate samples without setting their values: in shared memory if this process is a worker of a loader."""
    size = sum(_aligned(field.bytes_per_sample * samples) for field in fields)
    if get_worker_info() is None:
        return PackedSamples(torch.empty(size, dtype=torch.uint8, pin_memory=pinned), fields, samples)
    storage = torch.UntypedStorage._new_shared(size)  # noqa: SLF001  # as torch's own collation does
    return PackedSamples(torch.empty(0, dtype=torch.uint8).set_(storage), fields, samples)


def pack(parts: Sequence[Batch], *, pinned: bool = False) -> PackedSamples:
    """Join stacked samples, which have the same fields, of the same shapes but for the first dimension."""
    fields = tuple(PackedField(name, value.dtype, tuple(value.shape[1:]), value[0].nbytes) for name, value in parts[0].items())
    packed = allocate(fields, sum(len(next(iter(part.values()))) for part in parts), pinned=pinned)
    for name, joined in packed.unpack().items():
        torch.cat([part[name] for part in parts], out=joined)
    return packed


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
