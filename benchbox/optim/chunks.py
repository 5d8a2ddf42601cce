"""Float32 masters of live parameters, and the chunks in which an optimizer steps them."""

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

# Gradients are upcast, stepped and rounded back one bucket at a time, so the extra memory is a few buckets instead of 4 bytes
# per parameter. On a CPU, a bucket stays in the last-level cache from the upcast to the rounding. On other devices it has
# 16 MiB, which keeps the temporaries of a foreach step, a few times as large, below 64 MiB. Both sizes are a whole number of
# vectors: some kernels round the remainder at the end of a tensor differently, and chunks must not create more remainders.
BUCKET_ELEMENTS = {"cpu": 2**20}
_DEVICE_BUCKET_ELEMENTS = 2**22


class Granularity(Enum):
    """Tensors that an optimizer must see in one call to compute the same result as with all of them."""

    ELEMENT = "elements are independent: a large tensor may be stepped in chunks"
    TENSOR = "tensors are independent"
    ALL = "tensors may depend on each other"


_ELEMENTWISE = {
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.SGD,
}


def granularity_of(inner: type[torch.optim.Optimizer]) -> Granularity:
    """Return the granularity of an optimizer class.

    All optimizers in `torch.optim` except LBFGS step tensors independently. Others, including subclasses, may normalise over
    all tensors or count their calls.

    Raises:
        TypeError: the optimizer cannot step masters at all.
    """
    closure = inspect.signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{inner.__name__} evaluates its closure within the step, before the masters are rounded into the live weights; "
            "use an optimizer whose closure is optional"
        )
    if inner in _ELEMENTWISE:
        return Granularity.ELEMENT
    return Granularity.TENSOR if inner in vars(torch.optim).values() else Granularity.ALL


@dataclass(frozen=True, slots=True)
class ParameterChunk:
    """A live parameter, or its elements from `start` on, and the master that the inner optimizer steps for them.

    Views of the live parameter are created on demand because its storage may change when it moves to another device.
    """

    parameter: Tensor
    master: Tensor  # float32, in the shape of the parameter, or 1-D where `start` is set
    start: int | None = None  # None: the whole parameter

    def live(self) -> Tensor:
        """Return a view of the live weights of this chunk, in the shape of its master."""
        parameter = self.parameter.detach()
        # `view`, never `reshape`: after a change of the memory layout `reshape` would copy, and rounding into it would be lost.
        return self.slice(parameter if self.start is None else parameter.view(-1))

    def round_into_live(self) -> None:
        self.live().copy_(self.master)

    def gradient(self) -> Tensor | None:
        """Return the gradient of this chunk, in the shape of its master.

        Raises:
            ValueError: the gradient is sparse.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise ValueError("masters take dense gradients only, found a sparse one; build the embedding with sparse=False")
        return self.select(gradient)

    def select(self, tensor: Tensor) -> Tensor:
        """Return the elements of this chunk from a tensor in the shape of the parameter."""
        return tensor if self.start is None else self.slice(tensor.reshape(-1))

    def slice(self, tensor: Tensor) -> Tensor:
        """Return a view of the elements of this chunk in a flat tensor of the parameter's elements, or all of a whole one."""
        return tensor if self.start is None else tensor.narrow(0, self.start, self.master.numel())


def build_masters(parameters: Sequence[Tensor], masters: Sequence[Tensor] | None) -> list[Tensor]:
    """Return contiguous masters: `masters` after a check that they fit, or the live parameters upcast to float32.

    Raises:
        TypeError: a parameter cannot have a master.
        ValueError: `masters` do not fit the parameters.
    """
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            raise TypeError("a sharded parameter (DTensor) needs a master sharded alike; FSDP keeps float32 parameters itself")
        if parameter.dtype not in _LIVE_DTYPES:
            raise TypeError(f"no float32 master for a parameter of {parameter.dtype}; cast it to bfloat16 or leave it out")
    if masters is None:
        return [parameter.detach().to(torch.float32, copy=True).contiguous() for parameter in parameters]
    if len(masters) != len(parameters):
        raise ValueError(f"{len(masters)} masters for {len(parameters)} parameters")
    for parameter, master in zip(parameters, masters, strict=True):
        if master.shape != parameter.shape or master.dtype != torch.float32 or master.device != parameter.device:
            raise ValueError(
                f"a master must be float32 with the shape and device of its parameter: {tuple(parameter.shape)} on "
                f"{parameter.device}, found {master.dtype} {tuple(master.shape)} on {master.device}"
            )
    return [master.detach().contiguous() for master in masters]


def split_into_chunks(parameter: Tensor, master: Tensor, granularity: Granularity) -> list[ParameterChunk]:
    """Split a parameter and its master into chunks of at most one bucket if the granularity permits it.

    All chunks are views: nothing is copied.
    """
    limit = bucket_elements(master.device)
    if granularity is not Granularity.ELEMENT or parameter.numel() <= limit or not parameter.is_contiguous():
        return [ParameterChunk(parameter, master)]
    return [ParameterChunk(parameter, part, index * limit) for index, part in enumerate(master.view(-1).split(limit))]


def bucket_elements(device: torch.device) -> int:
    """Return the maximum number of elements in a bucket on that device."""
    return BUCKET_ELEMENTS.get(device.type, _DEVICE_BUCKET_ELEMENTS)


def flatten_chunks(groups: Iterable[Iterable[Iterable[ParameterChunk]]]) -> Iterator[ParameterChunk]:
    """Iterate over the chunks of all parameters of all groups, in order."""
    return chain.from_iterable(chain.from_iterable(groups))
