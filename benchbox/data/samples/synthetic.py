"""Synthetic samples: the batch table from a random generator, to measure steps without a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from benchbox.data.order.randomness import CONTENT, draw_random_fields, generator
from benchbox.data.samples.generated import GeneratedSource
from benchbox.data.samples.provenance import Provenance
from benchbox.data.text.prompt import ByteTokenizer, encode_cues
from benchbox.spec.datasets import UNKNOWN

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import BatchSpec

# Remainders of the index modulo 3: a sample with a subgoal but without a response, and one at the start of an episode, with
# neither history nor memory. Every sample has some text to learn.
SUBGOAL, EPISODE_START = 1, 2
# Remainders of the index modulo 4: a sample without one field of metadata, and one without any.
MISSING_FIELD, NO_FIELDS = 1, 3

_UNIFORM_STATISTICS = {
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


class SyntheticSamples(GeneratedSource):
    """Dataset of noise: every camera, frame and dimension is real; state and action are uniform on [-1, 1).

    Fields that a sample may lack are masked in some samples, depending on their index.
    """

    def __init__(self, spec: BatchSpec, seed: int) -> None:
        self.spec = spec
        self.seed = seed
        self._cue_tokens = encode_cues(spec, ByteTokenizer(spec.text_vocab)) if spec.cues else {}

    @property
    def statistics(self) -> list[dict[str, dict[str, list[float]]]]:
        """Statistics of the distribution, not of the drawn samples."""
        dims = {"observation.state": self.spec.state_dim, "action": self.spec.action_dim}
        return [
            {feature: {name: [value] * dim for name, value in _UNIFORM_STATISTICS.items()} for feature, dim in dims.items()}
        ]

    @property
    def provenance(self) -> Provenance:
        """One dataset without episodes of a robot."""
        return Provenance(("synthetic",), ("synthetic",), (UNKNOWN,))

    def sample(self, epoch: int, index: int) -> dict[str, Tensor]:
        """Return a row of the batch table. Only the fields from `draw_random_fields` depend on the epoch."""
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
            "source_index": torch.tensor(0),
            "control_mode_index": torch.tensor(0),
            "episode_index": torch.tensor(index),
            "frame_index": torch.tensor(0),
        }
        # text ids begin at 3, after pad, bos and eos; the last FAST id is its pad
        texts: list[tuple[str, tuple[int, ...], int, int, bool]] = [
            ("prompt", (spec.prompt_tokens,), 3, spec.text_vocab, True),
            ("response", (spec.response_tokens,), 3, spec.text_vocab, index % 3 != SUBGOAL),
            ("fast", (spec.fast_tokens,), 0, spec.fast_vocab - 1, True),
            ("memory", (spec.memory_tokens,), 3, spec.text_vocab, index % 3 != EPISODE_START),
            ("metadata", spec.metadata, 3, spec.text_vocab, index % 4 != NO_FIELDS),
        ]
        for name, shape, low, high, present in texts:
            if all(shape):
                sample[f"{name}_tokens"] = torch.from_numpy(rng.integers(low, high, shape))
                sample[f"{name}_mask"] = torch.full(shape, present)
        if all(spec.metadata) and index % 4 == MISSING_FIELD:
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
        if index % 3 == EPISODE_START:
            for name in ("images", "image_mask", "history_mask"):
                sample[name][: spec.history // 2] = 0
        drawn = draw_random_fields(spec, self.seed, epoch, [index])
        return sample | self._cue_tokens | {name: values[0] for name, values in drawn.items()}

    def _images(self, rng: np.random.Generator, frames: int) -> Tensor:
        """Return noise (frames, C, 3, H, W) uint8."""
        return torch.from_numpy(rng.integers(0, 256, (frames, self.spec.cameras, 3, *self.spec.image_size), dtype=np.uint8))
