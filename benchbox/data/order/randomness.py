"""Random numbers of samples: functions of the sample, independent of the process that loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from benchbox.registry.contracts import BatchSpec

# Purposes of generators: the first word of a key, so that no two uses share a stream of numbers.
ORDER, DRAWS, CONTENT, SPLIT, INTERLEAVING, BLOCKS, TAILS, ROWS = range(8)


def generator(purpose: int, *key: int) -> np.random.Generator:
    """Return a counter-based generator for a key, independent of process, rank, worker and call order."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([purpose, *key])))


def draw_random_fields(spec: BatchSpec, seed: int, epoch: int, indices: Sequence[int]) -> dict[str, Tensor]:
    """Draw float32 `noise` (n, D, N, A), `uniform` (n, U) and, if the spec asks for it, `latent_noise` of samples."""
    shapes = {
        "noise": (spec.noise_draws, spec.horizon, spec.action_dim),
        "uniform": (spec.uniforms,),
        **({"latent_noise": spec.latent_shape} if spec.latent_shape else {}),
    }
    fields = {name: np.empty((len(indices), *shape), np.float32) for name, shape in shapes.items()}
    for row, index in enumerate(indices):
        rng = generator(DRAWS, seed, epoch, index)
        for name, values in fields.items():
            draw = rng.random if name == "uniform" else rng.standard_normal
            draw(dtype=np.float32, out=values[row])
    return {name: torch.from_numpy(values) for name, values in fields.items()}
