"""Marks that rounding leaves in stored numbers, counted exactly and a piece at a time."""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE_ELEMENTS = 2**22


def bf16_valued_share(tensor: Tensor) -> float | None:
    """Of a float32 tensor, the share of elements that bfloat16 holds exactly: those whose lower 16 bits are zero. None of an
    empty tensor.

    Weights and moments that were trained in float32 have next to none; those that went through bfloat16 have nothing else.
    """
    if not tensor.numel():
        return None
    exact = 0
    for piece in tensor.detach().reshape(-1).split(_PIECE_ELEMENTS):
        exact += int(((piece.view(torch.int32) & 0xFFFF) == 0).sum())
    return exact / tensor.numel()


def stalled_share(second_moment: Tensor, beta2: float) -> float:
    """Of a 16-bit second moment, the share of non-zero elements v that stay v when multiplied by `beta2` and rounded back: what
    no absence of gradients lets decay.
    """
    stalled = nonzero = 0
    for piece in second_moment.detach().reshape(-1).split(_PIECE_ELEMENTS):
        held = piece[piece != 0]
        nonzero += held.numel()
        stalled += int(((held.float() * beta2).to(held.dtype) == held).sum())
    return stalled / nonzero if nonzero else 0.0
