"""Root-mean-square norms: Gemma's, and the adaptive one of the action expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from .precision import Linear

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6


def normalise(x: Tensor) -> Tensor:
    """Divide `x` by its root mean square along the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPSILON)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32, with the result in the dtype of `x`.

    With `unit`, as in Gemma, it multiplies by (1 + weight), and the weight is initialised to 0; otherwise it multiplies by the
    weight, which is initialised to 1.
    """

    def __init__(self, width: int, *, unit: bool = True) -> None:
        super().__init__()
        self.unit = unit
        self.weight = nn.Parameter(torch.zeros(width) if unit else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        return (normalise(x) * (1.0 + weight if self.unit else weight)).to(x.dtype)


class AdaRMSNorm(nn.Module):
    """Root-mean-square norm whose scale, shift and residual gate are projected from a condition.

    The projection is initialised to 0, as published: a new layer is the identity, and its weights get a gradient from the
    second step on.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = Linear(width, 3 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x` (B, L, W) modulated by `condition` (B, W), and the gate (B, 1, W) of the residual branch."""
        scale, shift, gate = self.modulation(condition).float().unsqueeze(1).chunk(3, dim=-1)
        return (normalise(x) * (1.0 + scale) + shift).to(x.dtype), gate.to(x.dtype)
