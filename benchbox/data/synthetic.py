"""Samples without files: the whole batch table from a generator, for measuring a step without a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from benchbox.data.randomness import CONTENT, draws, generator

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import BatchSpec

SAMPLES = 4096
"""Samples in an epoch."""

_UNIFORM = {
    "mean": 0.0,
    "std": 3**-0.5,
    "min": -1.0,
    "max": 1.0,
    "q01": -0.98,
    "q10": -0.8,
    "q50": 0.0,
    "q90": 0.8,
    "q99": 0.98,
}  # of the uniform distribution on [-1, 1)


class SyntheticSamples:
    """One dataset of noise: every camera, frame and dimension real, state and action uniform on [-1, 1)."""

    def __init__(self, spec: BatchSpec, seed: int) -> None:
        self.spec = spec
        self.seed = seed

    def __len__(self) -> int:
        return SAMPLES

    @property
    def statistics(self) -> list[dict[str, dict[str, list[float]]]]:
        """Those of the distribution, not of a draw."""
        dims = {"observation.state": self.spec.state_dim, "action": self.spec.action_dim}
        return [{feature: {name: [value] * dim for name, value in _UNIFORM.items()} for feature, dim in dims.items()}]

    def sample(self, epoch: int, index: int) -> dict[str, Tensor]:
        """One row of the batch table. The content is that of `index`; only `noise` and `uniform` change with the epoch."""
        spec = self.spec
        rng = generator(CONTENT, self.seed, index)
        images = rng.integers(0, 256, (spec.history, spec.cameras, 3, *spec.image_size), dtype=np.uint8)
        state = rng.uniform(-1, 1, (spec.history, spec.state_dim)).astype(np.float32)
        action = rng.uniform(-1, 1, (spec.horizon, spec.action_dim)).astype(np.float32)
        sample = {
            "images": torch.from_numpy(images),
            "image_mask": torch.ones(spec.history, spec.cameras, dtype=torch.bool),
            "state": torch.from_numpy(state),
            "action": torch.from_numpy(action),
            "action_is_pad": torch.zeros(spec.horizon, dtype=torch.bool),
            "action_dim_mask": torch.ones(spec.action_dim, dtype=torch.bool),
            "dataset_index": torch.tensor(0),
            "episode_index": torch.tensor(index),
            "frame_index": torch.tensor(0),
        }
        # ids from 3: below are pad, begin and end of text; the last FAST id is its pad
        texts = (("prompt", spec.prompt_tokens, 3, spec.text_vocab), ("response", spec.response_tokens, 3, spec.text_vocab))
        for name, length, low, high in (*texts, ("fast", spec.fast_tokens, 0, spec.fast_vocab - 1)):
            if length or name == "prompt":
                sample[f"{name}_tokens"] = torch.from_numpy(rng.integers(low, high, length))
                sample[f"{name}_mask"] = torch.ones(length, dtype=torch.bool)
        if spec.fast_tokens:
            sample["fast_truncated"] = torch.tensor(0)
        return sample | draws(spec, self.seed, epoch, index)
