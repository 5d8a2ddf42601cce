"""Samples of a dataset: windows of frames as rows of the batch table of a policy's `BatchSpec`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchbox.data.dataset.frame_images import FrameImages
from benchbox.data.dataset.lerobot import RESPONSE, LeRobotDataset
from benchbox.data.format.metadata import ACTION, STATE
from benchbox.data.normalisation import REQUIRED_STATISTICS, affine_parameters, finite_statistic
from benchbox.data.order.randomness import draw_random_fields
from benchbox.data.text.fast import FastTokenizer
from benchbox.data.text.prompt import CachedEncoder, encode_cues, encode_prompt, encode_target, pad_tokens, state_bins
from benchbox.data.text.tokenizer import open_tokenizer
from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from benchbox.data.format.metadata import Episode, Statistics
    from benchbox.registry.contracts import BatchSpec, NormalisationMode

FAST_CHUNKS = 2048  # for the training of the FAST tokenizer, evenly distributed over the dataset
METADATA = "metadata."  # prefix of text features that describe the episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Place of a dataset in a mixture: its numbers in the tables of names, and the camera of the dataset in each slot.

    `first` is the index of its first sample in the mixture. Without `cameras` the slots are the dataset's own cameras.
    """

    dataset: int = 0
    source: int = 0
    control_mode: int = 0
    first: int = 0
    cameras: tuple[str | None, ...] | None = None


class DatasetSamples:
    """Samples of one LeRobot dataset: sample i is the window whose current frame is frame i.

    Cameras are the dataset's first `spec.cameras`, in the order `meta/info.json` lists them, or those of its membership in a
    mixture; missing ones are black and masked.
    History before the start of the episode is black and masked too, and repeats its first state. Actions past its end repeat
    the last one and are marked in `action_is_pad`; future frames past its end repeat the last one and are masked in
    `future_mask`.

    Texts come from the dataset's text features: `response` (or LeRobot's subtask), `memory`, and fields of metadata, whose
    names begin with `metadata.`. An empty text is masked. If there is a response, the subgoal is the last frame of the
    consecutive frames with that response. LeRobot does not store the field of view.

    Args:
        tokenizer: a `tokenizer.json`; without one every byte is a token.
        membership: in the mixture that the samples are part of.
        train_fast: whether to train a FAST tokenizer on this dataset alone. The samples of a mixture share one: `fast`.

    Raises:
        DataError: the dataset's state or action is wider than the policy's, or a statistic is missing or not finite.
        ConfigurationError: the prompt or the actions do not fit the policy's vocabularies.
    """

    def __init__(
        self,
        dataset: LeRobotDataset,
        spec: BatchSpec,
        seed: int,
        tokenizer: Path | None = None,
        *,
        membership: Membership = Membership(),
        train_fast: bool = True,
    ) -> None:
        self.dataset = dataset
        self.spec = spec
        self.seed = seed
        self.membership = membership
        self._cameras = (membership.cameras or dataset.cameras)[: spec.cameras]
        for name, dims in ((STATE, spec.state_dim), (ACTION, spec.action_dim)):
            if self._dims(name) > dims:
                raise DataError(f"{dataset.root}: {name} has {self._dims(name)} dimensions, and the policy takes {dims}")
        self._check_statistics(STATE, spec.state_normalisation)
        self._check_statistics(ACTION, spec.action_normalisation)
        self._max_episode_length = max((episode.length for episode in dataset.episodes), default=1)
        self._tokenizer = open_tokenizer(tokenizer, spec.text_vocab)
        self._cue_tokens = encode_cues(spec, self._tokenizer)
        self._frame_images = FrameImages(dataset, spec)
        self._action_dim_mask = torch.arange(spec.action_dim) < self._dims(ACTION)
        self._encode_prompt = CachedEncoder(partial(encode_prompt, self._tokenizer, spec))
        self._encode_target = CachedEncoder(partial(encode_target, self._tokenizer))
        self._metadata_fields = [name for name in dataset.texts if name.startswith(METADATA)][: spec.metadata[0]]
        self._state_affine = self._normalisation(STATE, spec.state_normalisation) if spec.state_in_prompt else None
        self.fast: FastTokenizer | None = None
        if spec.fast_tokens:
            self._action_affine = self._normalisation(ACTION, "min_max")
            if train_fast:
                indices = evenly_distributed(len(dataset), FAST_CHUNKS)
                self.fast = FastTokenizer.train(map(self.chunk, indices), horizon=spec.horizon, vocab=spec.fast_vocab)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def statistics(self) -> list[Statistics]:
        """Statistics of state and action, which policies normalise."""
        return [{name: self.dataset.statistics.get(name, {}) for name in (STATE, ACTION)}]

    @property
    def decoder(self) -> str | None:
        """Decoder of the dataset's videos, None if it has none."""
        has_videos = any(feature["dtype"] == "video" for feature in self.dataset.features.values())
        return self.dataset.decoder if has_videos else None

    def sample(self, epoch: int, index: int) -> dict[str, Tensor]:
        """Return a row of the batch table. Only the fields from `draw_random_fields` depend on the epoch."""
        spec = self.spec
        episode = self.dataset.episode_of(index)
        history = np.arange(index - spec.history + 1, index + 1)  # (T,)
        state = self.dataset.column(STATE, max(episode.from_index, index - spec.history + 1), index + 1)
        if len(state) < spec.history:
            state = np.concatenate([state[:1].repeat(spec.history - len(state), axis=0), state])
        action, is_pad = self._action(index)
        images, image_mask = self._images(episode, history)
        sample = {
            "images": images,
            "image_mask": image_mask,
            "state": _pad_width(state, spec.state_dim),
            "history_mask": torch.from_numpy(history >= episode.from_index),
            "action": _pad_width(action, spec.action_dim),
            "action_is_pad": torch.from_numpy(is_pad),
            "action_dim_mask": self._action_dim_mask,
            "dataset_index": integer(self.membership.dataset),
            "source_index": integer(self.membership.source),
            "control_mode_index": integer(self.membership.control_mode),
            "episode_index": integer(episode.index),
            "frame_index": integer(index - episode.from_index),
        }
        texts = self._encode_texts(index, state[-1])
        if self.fast is not None:
            ids = self.fast.encode(self._normalise_action(action))
            texts["fast"] = pad_tokens(ids, spec.fast_tokens, self.fast.pad)
            sample["fast_truncated"] = integer(max(0, len(ids) - spec.fast_tokens))
        for name, (tokens, mask) in texts.items():
            sample[f"{name}_tokens"], sample[f"{name}_mask"] = torch.from_numpy(tokens), torch.from_numpy(mask)
        if spec.field_of_view:
            sample["field_of_view"] = torch.zeros(2)
        drawn = draw_random_fields(spec, self.seed, epoch, self.membership.first + index)
        return sample | self._future_fields(episode, index) | self._cue_tokens | drawn

    def chunk(self, index: int) -> np.ndarray:
        """Return the actions (N, D) from frame `index` on as a FAST tokenizer reads them: [min, max] is [-1, 1]."""
        return self._normalise_action(self._action(index)[0])

    def _encode_texts(self, index: int, state: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return the tokens and mask of every text in the spec."""
        spec, bins = self.spec, None
        if self._state_affine is not None:
            offset, scale = self._state_affine
            bins = state_bins((state - offset) / scale, spec.state_bins, spec.lowest_bin)
        task, past = self.dataset.task(index), self._past_memory(index) if spec.memory_tokens else ""
        texts = {"prompt": self._encode_prompt(task, None if bins is None else tuple(bins.tolist()), past)}
        if spec.response_tokens:
            response = self.dataset.text(RESPONSE, index)
            texts[RESPONSE] = self._encode_target(response, spec.response_tokens, spec.response_template)
        if spec.memory_tokens:
            texts["memory"] = self._encode_target(self.dataset.text("memory", index), spec.memory_tokens)
        if all(spec.metadata):
            texts["metadata"] = self._encode_metadata(index)
        return texts

    def _past_memory(self, index: int) -> str:
        """Return the memory of the frame before, which the policy remembers; at the start of an episode it is empty."""
        return self.dataset.text("memory", index - 1) if index > self.dataset.episode_of(index).from_index else ""

    def _encode_metadata(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens (K, L) int64 of the metadata, "field: text, " per row, and their mask."""
        rows, length = self.spec.metadata
        tokens = np.full((rows, length), self._tokenizer.pad, dtype=np.int64)
        mask = np.zeros((rows, length), dtype=bool)
        for row, name in enumerate(self._metadata_fields):
            if text := self.dataset.text(name, index):
                ids = self._tokenizer.encode(f"{name.removeprefix(METADATA)}: {text}, ")
                tokens[row], mask[row] = pad_tokens(ids, length, self._tokenizer.pad)
        return tokens, mask

    def _future_fields(self, episode: Episode, index: int) -> dict[str, Tensor]:
        """Return the fields derived from later frames: future images, the subgoal of the subtask, and the return."""
        spec, fields = self.spec, {}
        if spec.future:
            future = np.arange(index + 1, index + 1 + spec.future)
            fields["future_images"], _ = self._images(episode, future.clip(max=episode.to_index - 1))
            fields["future_mask"] = torch.from_numpy(future < episode.to_index)
        if spec.subgoal:
            has_response = bool(self.dataset.text(RESPONSE, index))
            goal = self.dataset.subtask_end(index) if has_response else episode.from_index - 1  # before the episode: masked
            images, mask = self._images(episode, np.array([goal]))
            fields["subgoal_images"], fields["subgoal_mask"] = images[0], mask[0]
        if spec.returns:
            remaining_steps = episode.to_index - 1 - index
            fields["returns"] = torch.tensor(-remaining_steps / self._max_episode_length, dtype=torch.float32)
        return fields

    def _images(self, episode: Episode, frames: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the images (T, C, 3, H, W) of frames (T,), and their mask (T, C), which is false before the episode."""
        spec = self.spec
        images = torch.zeros(len(frames), spec.cameras, 3, *spec.image_size, dtype=torch.uint8)
        mask = torch.zeros(len(frames), spec.cameras, dtype=torch.bool)
        for camera, name in enumerate(self._cameras):
            for t, frame in enumerate(frames):
                if name is not None and frame >= episode.from_index:
                    self._frame_images.write(name, int(frame), images[t, camera])
                    mask[t, camera] = True
        return images, mask

    def _action(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the raw actions (N, D) from the current frame on, and a mask (N,) of those past the end of the episode."""
        horizon = self.spec.horizon
        action = self.dataset.column(ACTION, index, min(index + horizon, self.dataset.episode_of(index).to_index))
        is_pad = np.zeros(horizon, dtype=bool)
        if len(action) < horizon:
            is_pad[len(action) :] = True
            action = np.concatenate([action, action[-1:].repeat(horizon - len(action), axis=0)])
        return action, is_pad

    def _normalise_action(self, action: np.ndarray) -> np.ndarray:
        offset, scale = self._action_affine
        chunk: np.ndarray = (action - offset) / scale
        return chunk

    def _check_statistics(self, name: str, mode: NormalisationMode) -> None:
        """Check those that the dataset has, here, where the file is known. The policy says which ones it misses."""
        where, stats = f"{self.dataset.root / 'meta/stats.json'}, {name}", self.dataset.statistics.get(name, {})
        if not isinstance(stats, dict):
            raise DataError(f"{where}: holds {stats!s:.60}, and statistics by name are expected; recompute it")
        for statistic in REQUIRED_STATISTICS[mode]:
            if statistic not in stats:
                continue
            values = finite_statistic(stats[statistic], f"{where}: statistic {statistic!r}")
            if values.numel() != self._dims(name):
                raise DataError(f"{where}: statistic {statistic!r} has {values.numel()} values, and {name} {self._dims(name)}")

    def _normalisation(self, name: str, mode: NormalisationMode) -> tuple[np.ndarray, np.ndarray]:
        stats = self.dataset.statistics.get(name, {})
        offset, scale = affine_parameters(
            stats, mode, self._dims(name), where=f"{self.dataset.root / 'meta/stats.json'}, {name}"
        )
        return offset.numpy(), scale.numpy()

    def _dims(self, name: str) -> int:
        return int(np.prod(self.dataset.features[name]["shape"]))


def integer(value: int) -> Tensor:
    """Return a tensor () int64, in a tenth of the time of `torch.tensor`."""
    return torch.from_numpy(np.array(value))


def evenly_distributed(length: int, number: int) -> list[int]:
    """Return at most `number` different indices below `length`, at equal distances."""
    return [int(i) for i in np.unique(np.linspace(0, length - 1, number, dtype=np.int64))] if length else []


def _pad_width(values: np.ndarray, width: int) -> Tensor:
    """Pad values (N, D) float32 with zeros to (N, width)."""
    padded = np.zeros((len(values), width), np.float32)
    padded[:, : values.shape[1]] = values
    return torch.from_numpy(padded)
