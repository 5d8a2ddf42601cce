"""Traces that rounding leaves in stored numbers, counted exactly, one chunk at a time."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 2**22


def is_bf16_valued(tensor: Tensor) -> Tensor:
    """Return which elements of a float32 tensor bfloat16 represents exactly: those whose lower 16 bits are zero.

    Weights and moments trained in float32 have almost none of them; after a round trip through bfloat16 all are of this kind.
    """
    return (tensor.view(torch.int32) & 0xFFFF) == 0


def bf16_valued_share(tensor: Tensor) -> float | None:
    """Return the share of elements that are `is_bf16_valued`, or None for an empty tensor."""
    if not tensor.numel():
        return None
    chunks = tensor.detach().reshape(-1).split(_CHUNK_ELEMENTS)
    return sum(int(is_bf16_valued(chunk).sum()) for chunk in chunks) / tensor.numel()


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
