"""Smooth action chunks to train and test the FAST tokenizer."""

import numpy as np

HORIZON, VOCAB = 20, 512


def smooth_chunks(count: int = 200, dims: int = 4, seed: int = 0) -> list[np.ndarray]:
    """Return chunks (HORIZON, dims) in [-1, 1] with a slow wave in each dimension."""
    rng = np.random.default_rng(seed)
    time = np.linspace(0, 1, HORIZON)[:, None]
    return [
        np.clip(0.9 * np.sin(2 * np.pi * (rng.uniform(0, 1, dims) * time + rng.uniform(0, 1, dims))), -1, 1)
        for _ in range(count)
    ]
