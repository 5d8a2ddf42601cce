"""Denoising diffusion: noise is added in steps, and a network tells what was added (DDPM, arXiv:2006.11239)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MARGIN, LARGEST_BETA = 0.008, 0.999


def alpha_bars(steps: int, device: torch.device) -> Tensor:
    """How much of the signal's variance is left after each step: (steps,), falling from almost 1 to almost 0.

    The squared cosine of Nichol and Dhariwal (arXiv:2102.09672, equation 17), with no step taking more than 0.999 of what was
    left. In float64, and formed where it is used: a buffer would be rounded with the parameters.
    """
    time = torch.arange(steps + 1, dtype=torch.float64, device=device) / steps
    cosine = ((time + MARGIN) / (1 + MARGIN) * math.pi / 2).cos().square()
    betas = (1 - cosine[1:] / cosine[:-1]).clamp(max=LARGEST_BETA)
    return (1 - betas).cumprod(dim=0)


def step_from_uniform(uniform: Tensor, steps: int) -> Tensor:
    """A step, 0 to steps - 1, all as likely, from each number in [0, 1): int64."""
    return (uniform.double() * steps).long()


def add_noise(clean: Tensor, noise: Tensor, step: Tensor, steps: int) -> Tensor:
    """What is left of `clean` after so many steps, and the noise in its place: float32, of unit variance where both are.

    Args:
        clean: (B, D, N, A), or with a D of 1.
        noise: (B, D, N, A), standard normal.
        step: (B, D) int64.
    """
    left = alpha_bars(steps, step.device)[step][..., None, None]
    return left.sqrt().float() * clean + (1 - left).sqrt().float() * noise


def ddim(epsilon: Callable[[Tensor, Tensor], Tensor], noise: Tensor, steps: int, taken: int) -> Tensor:
    """From `noise` (B, N, A) to what it may have been added to, without drawing any more (DDIM, arXiv:2010.02502, eta 0).

    Args:
        epsilon: the noise (B, N, A) in a point (B, N, A) at a step, a scalar int64.
        steps: of which noise was added.
        taken: how many of them are gone back, evenly spaced: of 100 in 10 those of number 90, 80, ..., 0.
    """
    left = alpha_bars(steps, noise.device)
    visited = [place * steps // taken for place in range(taken)]
    point = noise.float()
    for place in reversed(range(taken)):
        now = left[visited[place]]
        before = left[visited[place - 1]] if place else torch.ones_like(now)
        step = torch.full((), visited[place], device=noise.device)
        predicted = epsilon(point, step).float()
        clean = (point - (1 - now).sqrt() * predicted) / now.sqrt()
        point = before.sqrt() * clean + (1 - before).sqrt() * predicted
    return point


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Further from what is predicted without the condition, towards what is with it: 1 is no guidance (arXiv:2207.12598)."""
    return conditional + (scale - 1) * (conditional - unconditional)
