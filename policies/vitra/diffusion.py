"""Denoising diffusion (DDPM, arXiv:2006.11239) with the cosine schedule, and its sampling by DDIM (arXiv:2010.02502)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

COSINE_OFFSET, MAX_BETA = 0.008, 0.999


def alpha_bars(train_timesteps: int, device: torch.device) -> Tensor:
    """Return alpha_bar_t, the remaining variance of the signal, for each timestep: (train_timesteps,) float64.

    alpha_bar_t = f(t) / f(0) with f(t) = cos^2((t/T + s) / (1 + s) * pi/2) and s = 0.008, and each beta_t at most 0.999
    (Nichol and Dhariwal, arXiv:2102.09672, equation 17). It is computed where it is used; a buffer would be rounded with
    the parameters.
    """
    time = torch.arange(train_timesteps + 1, dtype=torch.float64, device=device) / train_timesteps
    f = ((time + COSINE_OFFSET) / (1 + COSINE_OFFSET) * math.pi / 2).cos().square()
    betas = (1 - f[1:] / f[:-1]).clamp(max=MAX_BETA)
    return (1 - betas).cumprod(dim=0)


def timestep_from_uniform(uniform: Tensor, train_timesteps: int) -> Tensor:
    """Map numbers in [0, 1) to uniformly distributed timesteps 0 to train_timesteps - 1: int64."""
    return (uniform.double() * train_timesteps).long()


def add_noise(x_0: Tensor, noise: Tensor, timestep: Tensor, train_timesteps: int) -> Tensor:
    """Return x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) noise in float32 (DDPM, equation 4).

    Args:
        x_0: (B, D, N, A), or with a D of 1.
        noise: (B, D, N, A), standard normal.
        timestep: (B, D) int64.
        train_timesteps: number of timesteps of the schedule.
    """
    alpha_bar = alpha_bars(train_timesteps, timestep.device)[timestep][..., None, None]
    return alpha_bar.sqrt().float() * x_0 + (1 - alpha_bar).sqrt().float() * noise


def ddim(epsilon: Callable[[Tensor, Tensor], Tensor], noise: Tensor, train_timesteps: int, inference_steps: int) -> Tensor:
    """Sample x_0 from `noise` (B, N, A) by DDIM with eta 0, which is deterministic (arXiv:2010.02502, equation 12).

    Args:
        epsilon: predicts the noise (B, N, A) in x_t (B, N, A) at a timestep, a scalar int64.
        noise: (B, N, A), standard normal.
        train_timesteps: number of timesteps of the schedule.
        inference_steps: number of evenly spaced timesteps to visit: of 100, ten steps visit 90, 80, ..., 0.
    """
    schedule = alpha_bars(train_timesteps, noise.device)
    timesteps = [index * train_timesteps // inference_steps for index in range(inference_steps)]
    x_t = noise.float()
    for index in reversed(range(inference_steps)):
        alpha_bar = schedule[timesteps[index]]
        alpha_bar_prev = schedule[timesteps[index - 1]] if index else torch.ones_like(alpha_bar)
        timestep = torch.full((), timesteps[index], device=noise.device)
        predicted = epsilon(x_t, timestep).float()
        x_0 = (x_t - (1 - alpha_bar).sqrt() * predicted) / alpha_bar.sqrt()
        x_t = alpha_bar_prev.sqrt() * x_0 + (1 - alpha_bar_prev).sqrt() * predicted
    return x_t
