"""Projection of patch features to tokens of the backbone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from .decoder import INIT_STD
from .norms import RMSNorm
from .precision import Linear

if TYPE_CHECKING:
    from torch import Tensor


class PooledProjector(nn.Module):
    """Projector of Gemma 3: squares of patches are averaged into one token, which is normed and projected."""

    def __init__(self, width: int, output_width: int, pool: int) -> None:
        super().__init__()
        self.pool = pool
        self.norm = RMSNorm(width)
        self.projection = Linear(width, output_width, bias=False)
        nn.init.normal_(self.projection.weight, std=INIT_STD)

    def forward(self, features: Tensor) -> Tensor:
        """Project (I, side * side, W), in row-major order, to (I, (side / pool)^2, V)."""
        side = round(features.shape[1] ** 0.5)
        square = features.transpose(1, 2).unflatten(2, (side, side))
        pooled = F.avg_pool2d(square, self.pool).flatten(2).transpose(1, 2)
        return self.projection(self.norm(pooled))
