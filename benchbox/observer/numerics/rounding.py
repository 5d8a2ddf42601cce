"""Traces that rounding leaves in stored numbers, counted exactly, one chunk at a time."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 2**22


def bf16_valued_share(tensor: Tensor) -> float | None:
    """Return the share of elements of a float32 tensor that bfloat16 represents exactly, or None for an empty tensor.

    These are the elements whose lower 16 bits are zero. Weights and moments trained in float32 have almost none of them; after
    a round trip through bfloat16 all elements are of this kind.
    """
    if not tensor.numel():
        return None
    exact = 0
    for chunk in tensor.detach().reshape(-1).split(_CHUNK_ELEMENTS):
        exact += int(((chunk.view(torch.int32) & 0xFFFF) == 0).sum())
    return exact / tensor.numel()


def stalled_share(second_moment: Tensor, beta2: float) -> float:
    """Return the share of non-zero elements v of a 16-bit second moment for which beta2 * v rounds back to v.

    Such elements never decay, however long their gradients are zero.
    """
    stalled = nonzero = 0
    for chunk in second_moment.detach().reshape(-1).split(_CHUNK_ELEMENTS):
        values = chunk[chunk != 0]
        nonzero += values.numel()
        stalled += int(((values.float() * beta2).to(values.dtype) == values).sum())
    return stalled / nonzero if nonzero else 0.0
