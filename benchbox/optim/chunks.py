"""Masters of live parameters, and the pieces they are stepped in."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_LIVE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Gradients are upcast, stepped and rounded back a bucket at a time, so that the extra memory is a few buckets instead of 4
# bytes a parameter. On a CPU a bucket stays in the last-level cache from the upcast to the rounding. On a device it is 16 MiB,
# so that the temporaries of a foreach step, a few times as large, stay below 64 MiB. Both are whole vectors: some kernels round
# what is left over at the end of a tensor otherwise, and pieces must not make more such ends.
BUCKET_ELEMENTS = {"cpu": 2**20}
_DEVICE_BUCKET_ELEMENTS = 2**22


class Grain(Enum):
    """What an optimizer must see together to compute what it would compute from everything at once."""

    ELEMENT = "every element by itself: a large tensor may be stepped in pieces"
    TENSOR = "every tensor by itself"
    ALL = "perhaps everything"


_BY_ELEMENT = {
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.SGD,
}


def grain_of(inner: type[torch.optim.Optimizer]) -> Grain:
    """Torch's own optimizers are known: but for LBFGS they take tensors one by one. Others, subclasses too, may normalise over
    all of them or count their calls.

    Raises:
        TypeError: it cannot step masters at all.
    """
    closure = inspect.signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{inner.__name__} evaluates its closure within the step, where live weights are not yet those of its masters"
        )
    if inner in _BY_ELEMENT:
        return Grain.ELEMENT
    return Grain.TENSOR if inner in vars(torch.optim).values() else Grain.ALL


@dataclass(frozen=True, slots=True)
class Piece:
    """A live parameter, or the elements of it from `start` on, and the master that the inner optimizer steps for them.

    Views of the live parameter are taken when they are needed: its storage may be another after a move to a device.
    """

    parameter: Tensor
    master: Tensor  # float32: the parameter's shape, or flat
    start: int | None = None  # None: the whole parameter

    def live(self) -> Tensor:
        """The live weights of this piece, in the shape of its master."""
        whole = self.parameter.detach()
        # A view, never a copy: `reshape` would round into nowhere where the layout has become another.
        return self._part(whole if self.start is None else whole.view(-1))

    def round_into_live(self) -> None:
        self.live().copy_(self.master)

    def gradient(self) -> Tensor | None:
        """The gradient of this piece, in the shape of its master.

        Raises:
            ValueError: it is sparse.
        """
        whole = self.parameter.grad
        if whole is None:
            return None
        if whole.layout != torch.strided:
            raise ValueError("masters take dense gradients only, found a sparse one; build the embedding with sparse=False")
        return self.part(whole)

    def part(self, whole: Tensor) -> Tensor:
        """Of a tensor in the parameter's shape, the elements that are this piece's."""
        return whole if self.start is None else self._part(whole.reshape(-1))

    def _part(self, whole: Tensor) -> Tensor:
        return whole if self.start is None else whole[self.start : self.start + self.master.numel()]


def masters_of(live: Sequence[Tensor], given: Sequence[Tensor] | None) -> list[Tensor]:
    """The masters given, once they fit their parameters, or masters upcast from them.

    Raises:
        TypeError: a parameter cannot have one.
        ValueError: those given do not fit.
    """
    for parameter in live:
        if isinstance(parameter, DTensor):
            raise TypeError("a sharded parameter (DTensor) needs a master sharded alike; FSDP keeps float32 parameters itself")
        if parameter.dtype not in _LIVE_DTYPES:
            raise TypeError(f"no float32 master for a parameter of {parameter.dtype}; cast it to bfloat16 or leave it out")
    if given is None:
        return [parameter.detach().to(torch.float32, copy=True).contiguous() for parameter in live]
    if len(given) != len(live):
        raise ValueError(f"{len(given)} masters for {len(live)} parameters")
    for parameter, master in zip(live, given, strict=True):
        if master.shape != parameter.shape or master.dtype != torch.float32 or master.device != parameter.device:
            raise ValueError(
                f"a master must be float32 with the shape and device of its parameter: {tuple(parameter.shape)} on "
                f"{parameter.device}, found {master.dtype} {tuple(master.shape)} on {master.device}"
            )
    return [master.detach().contiguous() for master in given]


def pieces_of(parameter: Tensor, master: Tensor, grain: Grain) -> list[Piece]:
    """A parameter and its master, in pieces of at most a bucket where that is allowed. All are views: nothing is copied."""
    most = _bucket_elements(master.device)
    if grain is not Grain.ELEMENT or parameter.numel() <= most or not parameter.is_contiguous():
        return [Piece(parameter, master)]
    return [Piece(parameter, part, index * most) for index, part in enumerate(master.view(-1).split(most))]


def _bucket_elements(device: torch.device) -> int:
    return BUCKET_ELEMENTS.get(device.type, _DEVICE_BUCKET_ELEMENTS)


Held = list[tuple[Piece, Tensor]]  # pieces with their gradients


def buckets(groups: Sequence[Iterable[Piece]], grain: Grain) -> Iterator[dict[int, Held]]:
    """Pieces that have a gradient, with it, by the number of their group: what is stepped in one call.

    A bucket is of one group and one device and at most `BUCKET_ELEMENTS` (what is larger stands alone), or it is everything,
    where the optimizer may have to see everything.
    """
    with_gradient = {
        index: ((piece, gradient) for piece in pieces if (gradient := piece.gradient()) is not None)
        for index, pieces in enumerate(groups)
    }
    if grain is Grain.ALL:
        everything = {index: list(held) for index, held in with_gradient.items()}
        if any(everything.values()):
            yield everything
        return
    for index, held in with_gradient.items():
        for bucket in _bounded(held):
            yield {index: bucket}


def _bounded(held: Iterable[tuple[Piece, Tensor]]) -> Iterator[Held]:
    bucket: Held = []
    elements = 0
    for piece, gradient in held:
        device = piece.master.device
        full = elements + piece.master.numel() > _bucket_elements(device)
        if bucket and (full or device != bucket[0][0].master.device):
            yield bucket
            bucket, elements = [], 0
        bucket.append((piece, gradient))
        elements += piece.master.numel()
    if bucket:
        yield bucket


def flat(groups: Iterable[Iterable[Iterable[Piece]]]) -> Iterator[Piece]:
    """The pieces of the parameters of groups, in order."""
    return chain.from_iterable(chain.from_iterable(groups))
