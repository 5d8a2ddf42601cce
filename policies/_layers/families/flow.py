"""Flow matching along a straight line, with noise at time 1 and the action at time 0, as in openpi and LeRobot."""

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
    """Map uniform numbers u to times t = 0.999 u^(1/1.5) + 0.001 in float32.

    u^(1/1.5) is distributed as Beta(1.5, 1), by its inverse distribution function: noisy times are more frequent, and 0 never
    occurs (pi0, arXiv:2410.24164, appendix B).
    """
    return uniform.float() ** (1 / 1.5) * 0.999 + 0.001


def interpolate(action: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Return the noisy action x_t and the target velocity u_t of the flow (pi0, arXiv:2410.24164, section IV).

    Args:
        action: (B, N, A).
        noise: (B, N, A).
        time: (B,), 1 for noise and 0 for the action; the paper's time runs the other way.
    """
    t = time[:, None, None]
    x_t = t * noise + (1 - t) * action
    u_t = noise - action
    return x_t, u_t


def embed_time(time: Tensor, width: int) -> Tensor:
    """Embed `time` (B,) as sines and cosines (B, width) float32 of geometrically spaced periods, computed in float64."""
    fractions = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    periods = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** fractions
    angles = 2 * math.pi * time.double()[:, None] / periods
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


def denoise(velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, steps: int) -> Tensor:
    """Integrate the velocity v_t from `noise` (B, N, A) at time 1 to an action at time 0, in equal Euler steps.

    Args:
        velocity: v_t (B, N, A) of a noisy action x_t (B, N, A) and a time (B,).
        noise: (B, N, A).
        steps: number of Euler steps.
    """
    x_t = noise.float()
    for step in range(steps):
        time = torch.full((len(noise),), 1.0 - step / steps, device=noise.device)
        x_t = x_t - velocity(x_t, time).float() / steps
    return x_t


class TimeCondition(nn.Module):
    """MLP from time (B,) to the condition (B, width) of adaRMS."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.inner = Linear(width, width)
        self.outer = Linear(width, width)

    def forward(self, time: Tensor) -> Tensor:
        return F.silu(self.outer(F.silu(self.inner(embed_time(time, self.width)))))


def flow_loss(predicted: Tensor, target: Tensor, step_is_pad: Tensor, dim_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared error summed over the valid steps and dimensions of each sample, and their number: two (B,) float32.

    Args:
        predicted: (B, N, A), the velocity v_t.
        target: (B, N, A), the velocity u_t.
        step_is_pad: (B, N) bool, True past the end of the episode.
        dim_mask: (B, A) bool, True for dimensions of the dataset.
    """
    mask = ~step_is_pad[:, :, None] & dim_mask[:, None, :]
    error = (predicted.float() - target.float()).square()
    return torch.where(mask, error, 0.0).sum(dim=(1, 2)), mask.sum(dim=(1, 2)).float()
