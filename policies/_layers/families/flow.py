"""Flow matching: from noise at time 1 to an action at time 0, along a straight line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from ..nn.precision import Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SHORTEST_PERIOD, LONGEST_PERIOD = 4e-3, 4.0


def time_from_uniform(uniform: Tensor) -> Tensor:
    """Beta(1.5, 1) * 0.999 + 0.001 by inverse distribution function: u^(1/1.5). Favours noise; never quite clean. float32."""
    return uniform.float() ** (1 / 1.5) * 0.999 + 0.001


def interpolate(action: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """The point at `time` (B,) between `action` (time 0) and `noise` (time 1), both (B, N, A), and the velocity there."""
    share = time[:, None, None]
    return share * noise + (1 - share) * action, noise - action


def embed_time(time: Tensor, width: int) -> Tensor:
    """Sines and cosines (B, width) float32 of `time` (B,), periods spaced geometrically; formed in float64."""
    steps = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    periods = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** steps
    angles = 2 * math.pi * time.double()[:, None] / periods
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


def denoise(velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, steps: int) -> Tensor:
    """Follow the velocity from `noise` (B, N, A) at time 1 to an action at time 0, in equal Euler steps.

    Args:
        velocity: of a point (B, N, A) at a time (B,): (B, N, A).
    """
    point = noise.float()
    for step in range(steps):
        time = torch.full((len(noise),), 1.0 - step / steps, device=noise.device)
        point = point - velocity(point, time).float() / steps
    return point


class TimeCondition(nn.Module):
    """Time (B,) to the condition (B, width) of adaRMS."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.inner = Linear(width, width)
        self.outer = Linear(width, width)

    def forward(self, time: Tensor) -> Tensor:
        return F.silu(self.outer(F.silu(self.inner(embed_time(time, self.width)))))


def flow_loss(predicted: Tensor, target: Tensor, step_is_pad: Tensor, dim_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error summed over the real steps and dimensions of each sample, and their number: two (B,) float32.

    Args:
        predicted: (B, N, A) velocity.
        target: (B, N, A).
        step_is_pad: (B, N) bool, True past the end of the episode.
        dim_mask: (B, A) bool, True for dimensions the dataset has.
    """
    real = ~step_is_pad[:, :, None] & dim_mask[:, None, :]
    error = (predicted.float() - target.float()).square()
    return torch.where(real, error, 0.0).sum(dim=(1, 2)), real.sum(dim=(1, 2)).float()
