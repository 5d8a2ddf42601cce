"""Shards of a tensor as DCP writes and reads them: boxes of the whole tensor, whichever way a backend splits it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: where it begins, and a view of its elements in the memory of this rank."""

    offsets: Shape
    view: Tensor


@dataclass(frozen=True, slots=True)
class Shards:
    """The parts of one tensor that this rank stores. Views are written in place when a checkpoint is read.

    DCP calls the three methods with double underscores instead of asking for a torch.Tensor.
    """

    shape: Shape  # of the whole tensor
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def joined(self, other: Shards) -> Shards:
        """Return these parts together with further ones of the same tensor."""
        return replace(self, boxes=(*self.boxes, *other.boxes))

    def copied_to_host(self) -> Shards:
        """Return a copy in memory of its own on the CPU, which later steps do not change."""
        return replace(self, boxes=tuple(Box(box.offsets, box.view.detach().to("cpu", copy=True)) for box in self.boxes))

    def view_at(self, offsets: Iterable[int]) -> Tensor:
        """Return the view of the box that begins at these offsets."""
        wanted = tuple(offsets)
        return next(box.view for box in self.boxes if box.offsets == wanted)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), box.view.size()) for box in self.boxes]

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.view_at(index.offset or (0,) * len(self.shape))


def full_shards(tensor: Tensor) -> Shards:
    """Return a tensor that this rank stores completely."""
    return Shards(tuple(tensor.shape), tensor.dtype, (Box((0,) * tensor.ndim, tensor.detach()),))


def row_shards(local: Tensor, shape: Shape, start: int) -> Shards:
    """Return consecutive rows of a tensor, from row `start` on; none where `local` has no elements."""
    boxes = (Box((start, *(0 for _ in shape[1:])), local.detach()),) if local.numel() else ()
    return Shards(shape, local.dtype, boxes)


def element_shards(flat: Tensor, shape: Shape, start: int) -> Shards:
    """Return consecutive elements of a tensor in row-major order, from element `start` on.

    Args:
        flat: (n,) the elements, contiguous in memory.
    """
    flat = flat.detach()
    return Shards(shape, flat.dtype, tuple(_boxes(flat, shape, start)))


def _boxes(flat: Tensor, shape: Shape, start: int, prefix: Shape = ()) -> Iterator[Box]:
    """Split a range of elements into boxes: in each dimension the end of one row, full rows, and the beginning of another.

    Args:
        flat: the elements of the range, which lies in the part of the tensor at `prefix`.
        shape: of that part.
        start: of the range in that part.
    """
    if not flat.numel():
        return
    if not shape:
        yield Box(prefix, flat.view((1,) * len(prefix)))
        return
    row = prod(shape[1:])
    stop = start + flat.numel()
    first, last = -(-start // row), stop // row  # of the whole rows
    if first > last:  # within one row
        yield from _boxes(flat, shape[1:], start - last * row, (*prefix, last))
        return
    head = first * row - start
    yield from _boxes(flat[:head], shape[1:], row - head, (*prefix, first - 1))
    body = (last - first) * row
    if body:
        view = flat[head : head + body].view(*(1 for _ in prefix), last - first, *shape[1:])
        yield Box((*prefix, first, *(0 for _ in shape[1:])), view)
    yield from _boxes(flat[head + body :], shape[1:], 0, (*prefix, last))
