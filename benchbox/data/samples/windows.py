"""Samples of a dataset: windows of frames as rows of the batch table of a policy's `BatchSpec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchbox.data.format.layouts.v2 import V21
from benchbox.data.format.metadata import ACTION, STATE
from benchbox.data.normalisation import REQUIRED_STATISTICS, affine_parameters, finite_statistic
from benchbox.data.order.randomness import draw_random_fields
from benchbox.data.samples.texts import FrameTexts
from benchbox.data.samples.window_images import WindowImages
from benchbox.data.text.prompt import pad_tokens, state_bins
from benchbox.errors import DataError
from benchbox.spec.datasets import is_camera

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from benchbox.data.dataset.lerobot import LeRobotDataset
    from benchbox.data.format.metadata import Episode, Statistics
    from benchbox.data.text.fast import FastTokenizer
    from benchbox.registry.contracts import Batch, BatchSpec, NormalisationMode


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
    the last one, and those before its start the first; both are marked in `action_is_pad`. Future frames past its end repeat
    the last one and are masked in `future_mask`.

    Texts come from the dataset's text features: `response` (or LeRobot's subtask), `memory`, and fields of metadata, whose
    names begin with `metadata.`. An empty text is masked. If there is a response, the subgoal is the last frame of the
    consecutive frames with that response. LeRobot does not store the field of view.

    Args:
        tokenizer: a `tokenizer.json`; without one every byte is a token.
        membership: in the mixture that the samples are part of, which also sets their FAST tokenizer `fast`.

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
    ) -> None:
        self.dataset = dataset
        self.spec = spec
        self.seed = seed
        self.membership = membership
        self._window_images = WindowImages(dataset, spec, (membership.cameras or dataset.cameras)[: spec.cameras])
        for name, dims in ((STATE, spec.state_dim), (ACTION, spec.action_dim)):
            if self._dims(name) > dims:
                raise DataError(f"{dataset.root}: {name} has {self._dims(name)} dimensions, and the policy takes {dims}")
        check_statistics(dataset, STATE, spec.state_normalisation)
        check_statistics(dataset, ACTION, spec.action_normalisation)
        self._max_episode_length = max((episode.length for episode in dataset.episodes), default=1)
        self._texts = FrameTexts(dataset, spec, tokenizer)
        self._action_dim_mask = torch.arange(spec.action_dim) < self._dims(ACTION)
        self._state_affine = self._normalisation(STATE, spec.state_normalisation) if spec.state_in_prompt else None
        self.fast: FastTokenizer | None = None
        if spec.fast_tokens:
            self._action_affine = self._normalisation(ACTION, "min_max")

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def statistics(self) -> list[Statistics]:
        """Statistics of state and action, which policies normalise."""
        return [{name: self.dataset.statistics.get(name, {}) for name in (STATE, ACTION)}]

    @property
    def decoder(self) -> str | None:
        """Decoder of the dataset's videos, None if it has none."""
        has_videos = any(feature["dtype"] == "video" and is_camera(feature) for feature in self.dataset.features.values())
        return self.dataset.decoder if has_videos else None

    def sample(self, epoch: int, index: int) -> Batch:
        """Return a row of the batch table: `samples` of one frame, without the first dimension."""
        return {name: values[0] for name, values in self.samples(epoch, index, index + 1).items()}

    def samples(self, epoch: int, start: int, stop: int) -> Batch:
        """Return n rows of the batch table, those of frames `start` up to `stop` (exclusive), which are of one episode.

        Only the fields from `draw_random_fields` depend on the epoch.

        Raises:
            DataError: a file of the dataset is missing or damaged.
        """
        spec, episode = self.spec, self.dataset.episode_of(start)
        frames = np.arange(start, stop)
        rows = len(frames)
        history = frames[:, None] + np.arange(1 - spec.history, 1)  # (n, T)
        first = max(episode.from_index, start - spec.history + 1)
        state = self.dataset.column(STATE, first, stop)[history.clip(min=first) - first]  # (n, T, D)
        action, is_pad = self._actions(episode, frames)
        fields = {
            **self._window_images.fields(episode, frames, history),
            "state": _pad_width(state, spec.state_dim),
            "history_mask": torch.from_numpy(history >= episode.from_index),
            "action": _pad_width(action, spec.action_dim),
            "action_is_pad": torch.from_numpy(is_pad),
            "action_dim_mask": self._action_dim_mask.expand(rows, -1),
            "dataset_index": _repeated(self.membership.dataset, rows),
            "source_index": _repeated(self.membership.source, rows),
            "control_mode_index": _repeated(self.membership.control_mode, rows),
            "episode_index": _repeated(episode.index, rows),
            "frame_index": torch.from_numpy(frames - episode.from_index),
        }
        encoded = self._texts.encode(start, self._state_bins(state[:, -1]))
        if self.fast is not None:
            pad = self.fast.pad
            ids = self.fast.encode_chunks(self._normalise_action(action))
            encoded["fast"] = [pad_tokens(chunk, spec.fast_tokens, pad) for chunk in ids]
            fields["fast_truncated"] = torch.from_numpy(np.array([max(0, len(chunk) - spec.fast_tokens) for chunk in ids]))
        for name, pairs in encoded.items():
            tokens, masks = zip(*pairs, strict=True)
            fields[f"{name}_tokens"], fields[f"{name}_mask"] = (
                torch.from_numpy(np.array(tokens)),
                torch.from_numpy(np.array(masks)),
            )
        if spec.field_of_view:
            fields["field_of_view"] = torch.zeros(rows, 2)
        if spec.returns:
            remaining_steps = episode.to_index - 1 - frames
            fields["returns"] = torch.from_numpy((-remaining_steps / self._max_episode_length).astype(np.float32))
        fields |= {name: tokens.expand(rows, -1) for name, tokens in self._texts.cues.items()}
        return fields | draw_random_fields(spec, self.seed, epoch, range(*(self.membership.first + i for i in (start, stop))))

    def describe_long_prompts(self) -> str | None:
        """See `FrameTexts.describe_long_prompts`."""
        return self._texts.describe_long_prompts()

    def describe_long_targets(self) -> list[str]:
        """See `FrameTexts.describe_long_targets`."""
        return self._texts.describe_long_targets()

    def chunk(self, index: int) -> np.ndarray:
        """Return the actions (N, D) of frame `index` as a FAST tokenizer reads them: [min, max] is [-1, 1]."""
        actions, _ = self._actions(self.dataset.episode_of(index), np.array([index]))
        return self._normalise_action(actions[0])

    def _state_bins(self, state: np.ndarray) -> list[tuple[int, ...] | None]:
        """Return the bin numbers of states (n, D) in prompts, None where prompts have no state."""
        if self._state_affine is None:
            return [None] * len(state)
        # Rounded to float32 only in the end: a state that is exactly q01 is then exactly -1, in the first bin and not below it.
        offset, scale = self._state_affine
        normalised = ((state - offset) / scale).astype(np.float32)
        bins = state_bins(normalised, self.spec.state_bins, self.spec.lowest_bin)
        return [tuple(row) for row in bins.tolist()]

    def _actions(self, episode: Episode, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the raw actions (n, N, D) of the chunk of each frame, and a mask (n, N) of those outside the episode."""
        wanted = frames[:, None] + self.spec.first_action + np.arange(self.spec.horizon)
        within = wanted.clip(episode.from_index, episode.to_index - 1)
        start, stop = int(within[0, 0]), int(within[-1, -1]) + 1
        return self.dataset.column(ACTION, start, stop)[within - start], within != wanted

    def _normalise_action(self, action: np.ndarray) -> np.ndarray:
        offset, scale = self._action_affine
        chunk: np.ndarray = (action - offset.astype(np.float32)) / scale.astype(np.float32)
        return chunk

    def _normalisation(self, name: str, mode: NormalisationMode) -> tuple[np.ndarray, np.ndarray]:
        stats = self.dataset.statistics.get(name, {})
        offset, scale = affine_parameters(stats, mode, self._dims(name), where=_statistics_of(self.dataset, name))
        return offset.numpy(), scale.numpy()

    def _dims(self, name: str) -> int:
        return int(np.prod(self.dataset.features[name]["shape"]))


def check_statistics(dataset: LeRobotDataset, name: str, mode: NormalisationMode) -> None:
    """Check those statistics of a feature that a mode uses and the dataset has. The policy says which ones it misses.

    Raises:
        DataError: one of them is damaged.
    """
    where, stats = _statistics_of(dataset, name), dataset.statistics.get(name, {})
    if not isinstance(stats, dict):
        raise DataError(f"{where}: holds {stats!s:.60}, and statistics by name are expected; recompute it")
    dims = int(np.prod(dataset.features[name]["shape"]))
    for statistic in REQUIRED_STATISTICS[mode]:
        if statistic not in stats:
            continue
        values = finite_statistic(stats[statistic], f"{where}: statistic {statistic!r}")
        if values.numel() != dims:
            raise DataError(f"{where}: statistic {statistic!r} has {values.numel()} values, and {name} {dims}")


def _statistics_of(dataset: LeRobotDataset, name: str) -> str:
    """Return where the statistics of a feature are, for messages."""
    file = "episodes_stats.jsonl" if dataset.info["codebase_version"] == V21 else "stats.json"
    return f"{dataset.root / 'meta' / file}, {name}"


def _pad_width(values: np.ndarray, width: int) -> Tensor:
    """Pad values (..., D) float32 with zeros to (..., width)."""
    padded = np.zeros((*values.shape[:-1], width), np.float32)
    padded[..., : values.shape[-1]] = values
    return torch.from_numpy(padded)


def _repeated(value: int, rows: int) -> Tensor:
    """Return a tensor (rows,) int64."""
    return torch.from_numpy(np.full(rows, value))
