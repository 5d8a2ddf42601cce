"""Random numbers of samples: functions of the sample, independent of the process that loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import BatchSpec

# Purposes of generators: the first word of a key, so that no two uses share a stream of numbers.
ORDER, DRAWS, CONTENT, SPLIT, INTERLEAVING, BLOCKS, TAILS, ROWS = range(8)


def generator(purpose: int, *key: int) -> np.random.Generator:
    """Return a counter-based generator for a key, independent of process, rank, worker and call order."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([purpose, *key])))


def draw_random_fields(spec: BatchSpec, seed: int, epoch: int, index: int) -> dict[str, Tensor]:
    """Draw `noise` (D, N, A), `uniform` (U,) and, if the spec asks for it, `latent_noise` of a sample in an epoch, float32."""
    rng = generator(DRAWS, seed, epoch, index)
    noise = rng.standard_normal((spec.noise_draws, spec.horizon, spec.action_dim), dtype=np.float32)
    uniform = rng.random(spec.uniforms, dtype=np.float32)
    fields = {"noise": torch.from_numpy(noise), "uniform": torch.from_numpy(uniform)}
    if spec.latent_shape:
        fields["latent_noise"] = torch.from_numpy(rng.standard_normal(spec.latent_shape, dtype=np.float32))
    return fields
