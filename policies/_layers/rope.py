"""Rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rotate(x: Tensor, positions: Tensor, *, base: float = 10_000.0) -> Tensor:
    """Turn each pair (i, i + D/2) of `x` (B, H, L, D) by position * base^(-2i/D), in float32; answers in the dtype of `x`.

    Angles are computed here from integer `positions` (B, L), once a layer, because a layer's floating inputs may be rounded by
    whoever shards it (FSDP casts them to bfloat16), and integers are not.
    """
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = positions[:, None, :, None].float() / base**exponents  # (B, 1, L, D/2)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
