"""Samples without files: the whole batch table from a generator, for measuring a step without a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from benchbox.data.randomness import CONTENT, draws, generator
from benchbox.data.text import ByteTokenizer, cues

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import BatchSpec

SAMPLES = 4096
"""Samples in an epoch."""

# Of every three samples: the one with a subgoal and without a response, and the one that begins an episode, without a past
# and a memory. Some text stays to be learned in each.
SUBGOAL, BEGINNING = 1, 2
# Of every four samples: the one without one field of metadata, and the one without any.
FEWER_FIELDS, NO_FIELDS = 1, 3

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
    """One dataset of noise: every camera, frame and dimension real, state and action uniform on [-1, 1).

    What a batch may lack some samples lack, by their index.
    """

    def __init__(self, spec: BatchSpec, seed: int) -> None:
        self.spec = spec
        self.seed = seed
        self._cues = cues(spec, ByteTokenizer(spec.text_vocab)) if spec.cues else {}

    def __len__(self) -> int:
        return SAMPLES

    @property
    def statistics(self) -> list[dict[str, dict[str, list[float]]]]:
        """Those of the distribution, not of a draw."""
        dims = {"observation.state": self.spec.state_dim, "action": self.spec.action_dim}
        return [{feature: {name: [value] * dim for name, value in _UNIFORM.items()} for feature, dim in dims.items()}]

    def sample(self, epoch: int, index: int) -> dict[str, Tensor]:
        """One row of the batch table. The content is that of `index`; only what `draws` gives changes with the epoch."""
        spec = self.spec
        rng = generator(CONTENT, self.seed, index)
        images = self._images(rng, spec.history)
        state = rng.uniform(-1, 1, (spec.history, spec.state_dim)).astype(np.float32)
        action = rng.uniform(-1, 1, (spec.horizon, spec.action_dim)).astype(np.float32)
        sample = {
            "images": images,
            "image_mask": torch.ones(spec.history, spec.cameras, dtype=torch.bool),
            "state": torch.from_numpy(state),
            "history_mask": torch.ones(spec.history, dtype=torch.bool),
            "action": torch.from_numpy(action),
            "action_is_pad": torch.zeros(spec.horizon, dtype=torch.bool),
            "action_dim_mask": torch.ones(spec.action_dim, dtype=torch.bool),
            "dataset_index": torch.tensor(0),
            "episode_index": torch.tensor(index),
            "frame_index": torch.tensor(0),
        }
        # ids from 3: below are pad, begin and end of text; the last FAST id is its pad
        texts: list[tuple[str, tuple[int, ...], int, int, bool]] = [
            ("prompt", (spec.prompt_tokens,), 3, spec.text_vocab, True),
            ("response", (spec.response_tokens,), 3, spec.text_vocab, index % 3 != SUBGOAL),
            ("fast", (spec.fast_tokens,), 0, spec.fast_vocab - 1, True),
            ("memory", (spec.memory_tokens,), 3, spec.text_vocab, index % 3 != BEGINNING),
            ("metadata", spec.metadata, 3, spec.text_vocab, index % 4 != NO_FIELDS),
        ]
        for name, shape, low, high, there in texts:
            if all(shape):
                sample[f"{name}_tokens"] = torch.from_numpy(rng.integers(low, high, shape))
                sample[f"{name}_mask"] = torch.full(shape, there)
        if all(spec.metadata) and index % 4 == FEWER_FIELDS:
            sample["metadata_mask"][index // 4 % spec.metadata[0]] = False
        if spec.fast_tokens:
            sample["fast_truncated"] = torch.tensor(0)
        if spec.subgoal:
            sample["subgoal_images"] = self._images(rng, 1)[0]
            sample["subgoal_mask"] = torch.full((spec.cameras,), index % 3 == SUBGOAL)
        if spec.future:
            sample["future_images"] = self._images(rng, spec.future)
            sample["future_mask"] = torch.ones(spec.future, dtype=torch.bool)
        if spec.returns:
            sample["returns"] = torch.tensor(-rng.random(), dtype=torch.float32)
        if spec.field_of_view:
            sample["field_of_view"] = torch.from_numpy(rng.uniform(0.5, 1.5, 2).astype(np.float32))
        if index % 3 == BEGINNING:
            for name in ("images", "image_mask", "history_mask"):
                sample[name][: spec.history // 2] = 0
        return sample | self._cues | draws(spec, self.seed, epoch, index)

    def _images(self, rng: np.random.Generator, frames: int) -> Tensor:
        """(frames, C, 3, H, W) uint8 of noise."""
        return torch.from_numpy(rng.integers(0, 256, (frames, self.spec.cameras, 3, *self.spec.image_size), dtype=np.uint8))
