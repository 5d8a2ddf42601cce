"""The gradient norm, in float32 whatever the gradients are, without a float32 copy of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of what this rank holds of the gradients: () float32.

    A norm taken in bfloat16 is off by up to 2^-9 of itself, and the sum over many tensors by more: each tensor's norm is
    therefore accumulated in float32 (or its own dtype, where that is wider).
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local.numel():
            norm = torch.linalg.vector_norm(local, dtype=torch.float32)
            total += norm * norm
    return total


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply gradients by so that their norm is at most `max_norm`: () float32 in (0, 1]; no host synchronisation.

    The small constant is that of `torch.nn.utils.clip_grad_norm_`, so that every backend clips alike.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
