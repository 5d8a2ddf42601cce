"""Sinusoidal embedding of diffusion timesteps, as in DiT (arXiv:2212.09748)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LONGEST_PERIOD = 10_000  # over 2 pi


def embed_timestep(timestep: Tensor, width: int) -> Tensor:
    """Embed timesteps (M,) as cosines, then sines, (M, width) float32, computed in float64.

    Angle i of the width / 2 is timestep * LONGEST_PERIOD^(-2i / width).
    """
    indices = torch.arange(width // 2, dtype=torch.float64, device=timestep.device)
    angles = timestep[:, None] * (-math.log(LONGEST_PERIOD) * indices / (width // 2)).exp()
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()
