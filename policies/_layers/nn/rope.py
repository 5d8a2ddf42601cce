"""Rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rotary_cos_sin(positions: Tensor, width: int, base: float, stretch: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B, 1, L, D/2) float32 of position / stretch * base^(-2i/D), for integer `positions` (B, L) and heads of
    `width` D.

    Formed in each layer rather than handed to it: whoever shards a layer may round its floating inputs (FSDP can cast them to
    bfloat16), and integers are not rounded.
    """
    exponents = torch.arange(width // 2, device=positions.device, dtype=torch.float32) / (width // 2)
    angles = positions[:, None, :, None].float() / (stretch * base**exponents)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of `x` (B, H, L, D) in float32; answers in the dtype of `x`."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
