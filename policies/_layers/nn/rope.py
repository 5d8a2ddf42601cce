"""Rotary position embedding (RoPE, arXiv:2104.09864)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rotary_cos_sin(positions: Tensor, head_dim: int, base: float, stretch: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine of the rotary angles m * theta_i, with m = position / stretch and theta_i = base^(-2i/D).

    Each layer computes them instead of receiving them: sharding may round a layer's floating-point inputs (FSDP can cast them
    to bfloat16), and integer positions are not rounded.

    Args:
        positions: (B, L), integer.
        head_dim: D.
        base: of the geometric progression of frequencies.
        stretch: positions are divided by it.

    Returns:
        Two (B, 1, L, D/2) float32.
    """
    exponents = torch.arange(head_dim // 2, device=positions.device, dtype=torch.float32) / (head_dim // 2)
    angles = positions[:, None, :, None].float() / (stretch * base**exponents)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of `x` (B, H, L, D) in float32; returns the dtype of `x`."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
