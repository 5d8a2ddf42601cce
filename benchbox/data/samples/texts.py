"""Texts of a dataset's frames as tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.dataset.lerobot import RESPONSE, LeRobotDataset
from benchbox.data.text.prompt import CachedEncoder, encode_cues, encode_prompt, encode_target, pad_tokens
from benchbox.data.text.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.registry.contracts import BatchSpec

METADATA = "metadata."  # prefix of text features that describe the episode


class FrameTexts:
    """Encoder of the texts of a dataset that a policy reads or learns to generate.

    Args:
        tokenizer: a `tokenizer.json`; without one every byte is a token.

    Raises:
        ConfigurationError: the tokenizer does not fit the policy's text vocabulary.
    """

    def __init__(self, dataset: LeRobotDataset, spec: BatchSpec, tokenizer: Path | None) -> None:
        self._dataset = dataset
        self._spec = spec
        self._tokenizer = open_tokenizer(tokenizer, spec.text_vocab)
        self.cues = encode_cues(spec, self._tokenizer)
        self._encode_prompt = CachedEncoder(partial(encode_prompt, self._tokenizer, spec))
        self._encode_target = CachedEncoder(partial(encode_target, self._tokenizer))
        self._metadata_fields = [name for name in dataset.texts if name.startswith(METADATA)][: spec.metadata[0]]

    def encode(self, start: int, bins: Sequence[tuple[int, ...] | None]) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
        """Return the tokens and mask of every text in the spec, for the frames from `start` on.

        Args:
            bins: bin numbers of the state of every frame, None without a state in the prompt.

        Raises:
            ConfigurationError: the prompt has no room for its task.
            DataError: the dataset is damaged.
        """
        spec, dataset, frames = self._spec, self._dataset, range(start, start + len(bins))
        texts = {
            "prompt": [
                self._encode_prompt(dataset.task(frame), state, self._past_memory(frame))
                for frame, state in zip(frames, bins, strict=True)
            ]
        }
        if spec.response_tokens:
            length, template = spec.response_tokens, spec.response_template
            texts[RESPONSE] = [self._encode_target(dataset.text(RESPONSE, frame), length, template) for frame in frames]
        if spec.memory_tokens:
            texts["memory"] = [self._encode_target(dataset.text("memory", frame), spec.memory_tokens) for frame in frames]
        if all(spec.metadata):
            texts["metadata"] = [self._encode_metadata(frame) for frame in frames]
        return texts

    def _past_memory(self, frame: int) -> str:
        """Return the memory of the frame before, which the policy remembers; at the start of an episode it is empty."""
        if not self._spec.memory_tokens or frame == self._dataset.episode_of(frame).from_index:
            return ""
        return self._dataset.text("memory", frame - 1)

    def _encode_metadata(self, frame: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens (K, L) int64 of the metadata, "field: text, " per row, and their mask."""
        rows, length = self._spec.metadata
        tokens = np.full((rows, length), self._tokenizer.pad, dtype=np.int64)
        mask = np.zeros((rows, length), dtype=bool)
        for row, name in enumerate(self._metadata_fields):
            if text := self._dataset.text(name, frame):
                ids = self._tokenizer.encode(f"{name.removeprefix(METADATA)}: {text}, ")
                tokens[row], mask[row] = pad_tokens(ids, length, self._tokenizer.pad)
        return tokens, mask
