"""Rows of the batch table out of a dataset: windows of frames, as a policy's `BatchSpec` wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from benchbox.data.fast import FastTokenizer
from benchbox.data.lerobot import ACTION, RESPONSE, STATE, LeRobotDataset
from benchbox.data.normalisation import affine
from benchbox.data.randomness import draws
from benchbox.data.text import cues, padded, prompt, said, state_bins
from benchbox.data.tokenizer import open_tokenizer
from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from benchbox.data.metadata import Episode, Statistics
    from benchbox.registry.contracts import BatchSpec, NormalisationMode

FAST_CHUNKS = 2048  # that the FAST tokenizer is trained on, spread evenly over the dataset
METADATA = "metadata."  # begins the names of text features about the episode


class DatasetSamples:
    """Samples of one LeRobot dataset: sample i is the window whose current frame is frame i.

    Cameras are the dataset's first `spec.cameras`, in the order `meta/info.json` lists them; where it has fewer, the rest
    are black and masked. History before the start of the episode is black and masked too, and repeats its first state.
    Actions past its end repeat the last one and are marked `action_is_pad`; so do future frames, in `future_mask`.

    In words a dataset says what it has text features for: `response`, which may also be a subtask of LeRobot, `memory`, and
    fields of metadata, whose names begin with `metadata.`. An empty text is masked. Where there is a response the subgoal is
    the last frame of the frames with the same one. Nothing in LeRobot says the field of view.

    Args:
        tokenizer: a `tokenizer.json`; without one every byte is a token.

    Raises:
        DataError: the dataset's state or action is wider than the policy takes, or a statistic is missing.
        ConfigurationError: the prompt or the actions do not fit the policy's vocabularies.
    """

    def __init__(self, dataset: LeRobotDataset, spec: BatchSpec, seed: int, tokenizer: Path | None = None) -> None:
        self.dataset = dataset
        self.spec = spec
        self.seed = seed
        for name, room in ((STATE, spec.state_dim), (ACTION, spec.action_dim)):
            if self._dims(name) > room:
                raise DataError(f"{dataset.root}: {name} has {self._dims(name)} dimensions, and the policy takes {room}")
        self._longest = max((episode.length for episode in dataset.episodes), default=1)
        self._tokenizer = open_tokenizer(tokenizer, spec.text_vocab)
        self._cues = cues(spec, self._tokenizer)
        self._metadata = [name for name in dataset.texts if name.startswith(METADATA)][: spec.metadata[0]]
        self._state_affine = self._affine(STATE, spec.state_normalisation) if spec.state_in_prompt else None
        self._fast: FastTokenizer | None = None
        if spec.fast_tokens:
            self._action_affine = self._affine(ACTION, "min_max")
            indices = np.unique(np.linspace(0, len(dataset) - 1, FAST_CHUNKS, dtype=np.int64))
            chunks = (self._fast_chunk(self._action(int(i))[0]) for i in indices)
            self._fast = FastTokenizer.train(chunks, horizon=spec.horizon, vocab=spec.fast_vocab)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def statistics(self) -> list[Statistics]:
        """Those of state and action, which is what policies normalise by."""
        return [{name: self.dataset.statistics.get(name, {}) for name in (STATE, ACTION)}]

    def sample(self, epoch: int, index: int) -> dict[str, Tensor]:
        """One row of the batch table; only `noise` and `uniform` change with the epoch."""
        spec = self.spec
        episode = self.dataset.episode_of(index)
        history = np.arange(index - spec.history + 1, index + 1)  # (T,)
        state = self._rows(STATE, history.clip(min=episode.from_index))
        action, is_pad = self._action(index)
        images, image_mask = self._images(episode, history)
        sample = {
            "images": images,
            "image_mask": image_mask,
            "state": _widened(state, spec.state_dim),
            "history_mask": torch.from_numpy(history >= episode.from_index),
            "action": _widened(action, spec.action_dim),
            "action_is_pad": torch.from_numpy(is_pad),
            "action_dim_mask": torch.arange(spec.action_dim) < action.shape[1],
            "dataset_index": torch.tensor(0),
            "episode_index": torch.tensor(episode.index),
            "frame_index": torch.tensor(index - episode.from_index),
        }
        texts = self._texts(index, state[-1])
        if self._fast is not None:
            ids = self._fast.encode(self._fast_chunk(action))
            texts["fast"] = padded(ids, spec.fast_tokens, self._fast.pad)
            sample["fast_truncated"] = torch.tensor(max(0, len(ids) - spec.fast_tokens))
        for name, (tokens, mask) in texts.items():
            sample[f"{name}_tokens"], sample[f"{name}_mask"] = torch.from_numpy(tokens), torch.from_numpy(mask)
        if spec.field_of_view:
            sample["field_of_view"] = torch.zeros(2)
        return sample | self._ahead(episode, index) | self._cues | draws(spec, self.seed, epoch, index)

    def _texts(self, index: int, state: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """What is said in words: tokens and their mask."""
        spec, binned = self.spec, None
        if self._state_affine is not None:
            offset, scale = self._state_affine
            binned = state_bins((state - offset) / scale, spec.state_bins)
        texts = {"prompt": prompt(self._tokenizer, spec, self.dataset.task(index), binned)}
        for name, length in ((RESPONSE, spec.response_tokens), ("memory", spec.memory_tokens)):
            if length:
                texts[name] = said(self._tokenizer, self.dataset.text(name, index), length)
        if all(spec.metadata):
            texts["metadata"] = self._about(index)
        return texts

    def _about(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (K, L) int64 of what is known about the episode, "field: text, " each, and their mask."""
        fields, length = self.spec.metadata
        tokens = np.full((fields, length), self._tokenizer.pad, dtype=np.int64)
        mask = np.zeros((fields, length), dtype=bool)
        for field, name in enumerate(self._metadata):
            if text := self.dataset.text(name, index):
                ids = self._tokenizer.encode(f"{name.removeprefix(METADATA)}: {text}, ")
                tokens[field], mask[field] = padded(ids, length, self._tokenizer.pad)
        return tokens, mask

    def _ahead(self, episode: Episode, index: int) -> dict[str, Tensor]:
        """What follows the current frame: the frames themselves, where the subtask leads, and how many frames are left."""
        spec, ahead = self.spec, {}
        if spec.future:
            future = np.arange(index + 1, index + 1 + spec.future)
            ahead["future_images"], _ = self._images(episode, future.clip(max=episode.to_index - 1))
            ahead["future_mask"] = torch.from_numpy(future < episode.to_index)
        if spec.subgoal:
            known = bool(self.dataset.text(RESPONSE, index))
            goal = self.dataset.subtask_end(index) if known else episode.from_index - 1  # not real
            images, mask = self._images(episode, np.array([goal]))
            ahead["subgoal_images"], ahead["subgoal_mask"] = images[0], mask[0]
        if spec.returns:
            left = episode.to_index - 1 - index  # steps
            ahead["returns"] = torch.tensor(-left / self._longest, dtype=torch.float32)
        return ahead

    def _images(self, episode: Episode, frames: np.ndarray) -> tuple[Tensor, Tensor]:
        """Those of frames (T,) of an episode, (T, C, 3, H, W), and which are real (T, C): none before the episode."""
        spec = self.spec
        images = torch.zeros(len(frames), spec.cameras, 3, *spec.image_size, dtype=torch.uint8)
        mask = torch.zeros(len(frames), spec.cameras, dtype=torch.bool)
        for camera, name in enumerate(self.dataset.cameras[: spec.cameras]):
            for t, frame in enumerate(frames):
                if frame >= episode.from_index:
                    images[t, camera] = letterbox(self.dataset.image(name, int(frame)), spec.image_size)
                    mask[t, camera] = True
        return images, mask

    def _action(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(N, D) raw actions from the current frame on, and which of them lie past the end of the episode (N,)."""
        last = self.dataset.episode_of(index).to_index - 1
        frames = np.arange(index, index + self.spec.horizon)
        return self._rows(ACTION, frames.clip(max=last)), frames > last

    def _rows(self, name: str, frames: np.ndarray) -> np.ndarray:
        first = int(frames[0])
        rows: np.ndarray = self.dataset.column(name, first, int(frames[-1]) + 1)[frames - first]
        return rows

    def _fast_chunk(self, action: np.ndarray) -> np.ndarray:
        offset, scale = self._action_affine
        chunk: np.ndarray = (action - offset) / scale
        return chunk

    def _affine(self, name: str, mode: NormalisationMode) -> tuple[np.ndarray, np.ndarray]:
        stats = self.dataset.statistics.get(name, {})
        offset, scale = affine(stats, mode, self._dims(name), where=f"{self.dataset.root / 'meta/stats.json'}, {name}")
        return offset.numpy(), scale.numpy()

    def _dims(self, name: str) -> int:
        return int(np.prod(self.dataset.features[name]["shape"]))


def letterbox(image: Tensor, size: tuple[int, int]) -> Tensor:
    """(3, H, W) uint8 resized to fit `size`, its proportions kept, in the middle of black bars."""
    height, width = image.shape[1:]
    if (height, width) == size:
        return image
    ratio = min(size[0] / height, size[1] / width)
    inner = (max(1, round(height * ratio)), max(1, round(width * ratio)))
    resized = F.interpolate(image[None], inner, mode="bilinear", align_corners=False, antialias=True)[0]
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    return F.pad(resized, (left, size[1] - inner[1] - left, top, size[0] - inner[0] - top))


def _widened(values: np.ndarray, width: int) -> Tensor:
    """(N, D) padded with zeros to (N, width)."""
    return F.pad(torch.from_numpy(values), (0, width - values.shape[1]))
