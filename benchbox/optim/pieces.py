"""Parameters and their masters in the pieces they are stepped in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Gradients are upcast, stepped and rounded back a bucket at a time, so that the extra memory is one bucket instead of 4 bytes a
# parameter. On a CPU a bucket is small enough to stay in the cache from the upcast to the rounding; on a device it is 64 MiB,
# large enough that launching kernels takes no time beside running them.
BUCKET_ELEMENTS = {"cpu": 2**20}
_DEVICE_BUCKET_ELEMENTS = 2**24


@dataclass(frozen=True, slots=True)
class Piece:
    """A live parameter, or the elements of it from `start` on, and the master that the inner optimizer steps for them.

    Views of the live parameter are taken when they are needed: its storage may be another after a move to a device.
    """

    parameter: Tensor
    master: Tensor  # float32: the parameter's shape, or flat
    start: int | None = None  # None: the whole parameter

    def live(self) -> Tensor:
        return self.part(self.parameter.detach())

    def gradient(self) -> Tensor | None:
        whole = self.parameter.grad
        return None if whole is None else self.part(whole)

    def part(self, whole: Tensor) -> Tensor:
        """Of a tensor in the parameter's shape, the elements that are this piece's: a view."""
        return whole if self.start is None else whole.reshape(-1)[self.start : self.start + self.master.numel()]


def pieces_of(parameter: Tensor, master: Tensor, *, whole: bool) -> Iterator[Piece]:
    """A parameter and its master, in pieces of at most a bucket where that is allowed. All are views: nothing is copied."""
    most = _bucket_elements(master.device)
    if whole or parameter.numel() <= most or not parameter.is_contiguous():
        yield Piece(parameter, master)
        return
    for index, part in enumerate(master.view(-1).split(most)):
        yield Piece(parameter, part, index * most)


def _bucket_elements(device: torch.device) -> int:
    return BUCKET_ELEMENTS.get(device.type, _DEVICE_BUCKET_ELEMENTS)


def buckets(pieces: Iterable[Piece]) -> Iterator[list[tuple[Piece, Tensor]]]:
    """Pieces that have a gradient, with it, at most a bucket of elements at a time (what is larger stands alone)."""
    bucket: list[tuple[Piece, Tensor]] = []
    elements = 0
    for piece in pieces:
        gradient = piece.gradient()
        if gradient is None:
            continue
        device = piece.master.device
        full = elements + piece.master.numel() > _bucket_elements(device)
        if bucket and (full or device != bucket[0][0].master.device):
            yield bucket
            bucket, elements = [], 0
        bucket.append((piece, gradient))
        elements += piece.master.numel()
    if bucket:
        yield bucket


def joined(parts: list[Any], pieces: list[Piece], shape: torch.Size) -> Any:
    """State of a parameter's pieces as that of the parameter: elements side by side; what is not by element is alike in all."""
    if len(parts) == 1 or not isinstance(parts[0], Tensor) or parts[0].shape != pieces[0].master.shape:
        return parts[0]
    return torch.cat(parts).view(shape)


def part_of(value: Any, piece: Piece) -> Any:
    """The reverse, a copy: pieces must not share what each of them counts up."""
    if not isinstance(value, Tensor):
        return value
    return piece.part(value).clone() if value.shape == piece.parameter.shape else value.clone()
