"""The gradient norm, in float32 whatever the gradients are, without a float32 copy of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

# On a CPU 16-bit elements are upcast this many at a time, which stay in the cache between upcast and product.
_PIECE_ELEMENTS = 2**20


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of what this rank holds of the gradients: () float32.

    A norm taken in bfloat16 is off by up to 2^-9 of itself, and the sum over many tensors by more: every element is squared and
    summed in float32.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    scratch = torch.empty(_PIECE_ELEMENTS, dtype=torch.float32) if device.type == "cpu" else None
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if scratch is not None and local.dtype != torch.float32:
            for piece in local.reshape(-1).split(_PIECE_ELEMENTS):
                upcast = scratch[: piece.numel()].copy_(piece)
                total += torch.dot(upcast, upcast)
        elif local.numel():
            norm = torch.linalg.vector_norm(local, dtype=torch.float32)
            total += norm * norm
    return total


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply gradients by so that their norm is at most `max_norm`: () float32 in (0, 1]; no host synchronisation.

    The small constant is that of `torch.nn.utils.clip_grad_norm_`, so that every backend clips alike.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
