"""Everything random about a sample, as a function of what the sample is and never of who loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import BatchSpec

# What a generator is for: the first word of its key, so that no two uses share a stream of numbers.
ORDER, DRAWS, CONTENT = range(3)


def generator(purpose: int, *key: int) -> np.random.Generator:
    """A counter-based generator for that key: independent of process, rank, worker and call order."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([purpose, *key])))


def draws(spec: BatchSpec, seed: int, epoch: int, index: int) -> dict[str, Tensor]:
    """`noise` (D, N, A), `uniform` (U,) and, where there is a shape, `latent_noise` of one sample in one epoch, float32."""
    rng = generator(DRAWS, seed, epoch, index)
    noise = rng.standard_normal((spec.noise_draws, spec.horizon, spec.action_dim), dtype=np.float32)
    uniform = rng.random(spec.uniforms, dtype=np.float32)
    drawn = {"noise": torch.from_numpy(noise), "uniform": torch.from_numpy(uniform)}
    if spec.latent_shape:
        drawn["latent_noise"] = torch.from_numpy(rng.standard_normal(spec.latent_shape, dtype=np.float32))
    return drawn
