"""Samples of one or several LeRobot datasets, of different robots, in one index space."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from benchbox.data.order.frames import SampleKey
from benchbox.data.order.groups import SampleGroup
from benchbox.data.order.spacing import evenly_distributed
from benchbox.data.samples.provenance import Provenance
from benchbox.data.samples.selection import FrameSelection, check_not_empty, count_frames, select_frames, used_episodes
from benchbox.data.samples.windows import DatasetSamples, Membership
from benchbox.data.text.fast import FastTokenizer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from benchbox.data.dataset.lerobot import LeRobotDataset
    from benchbox.data.format.metadata import Statistics
    from benchbox.registry.contracts import Batch, BatchSpec
    from benchbox.spec.datasets import DatasetSpec


FAST_CHUNKS = 2048  # for the training of the FAST tokenizer, evenly distributed over what is drawn


@dataclass(frozen=True, slots=True)
class MixtureDataset:
    """An open dataset, what the configuration says about it, and the frames that are drawn of it."""

    dataset: LeRobotDataset
    settings: DatasetSpec
    selection: FrameSelection


def select_datasets(
    datasets: Iterable[tuple[LeRobotDataset, DatasetSpec]], *, validation: float, seed: int
) -> list[MixtureDataset]:
    """Select the frames of every dataset of a mixture.

    Raises:
        DataError: a keep file is missing or damaged, or there is nothing to train on in a dataset.
        ConfigurationError: a keep file names frames that the dataset does not have.
    """
    entries, members = list(datasets), []
    roots = [dataset.root.resolve() for dataset, _ in entries]
    for number, (dataset, settings) in enumerate(entries):
        # Entries of one dataset divide its episodes alike: none is trained on in one and validated in another.
        first = roots.index(roots[number])
        keeps = [other.keep for root, (_, other) in zip(roots, entries, strict=True) if root == roots[number]]
        divided = used_episodes(dataset.episodes, keeps) if len(keeps) > 1 else None
        selection = select_frames(
            dataset.episodes, settings.keep, validation=validation, seed=seed, dataset=first, divided=divided
        )
        check_not_empty(selection, settings.path)
        members.append(MixtureDataset(dataset, settings, selection))
    return members


class MixtureSamples:
    """Samples of several LeRobot datasets: sample i is the window whose current frame is frame i of all datasets in a row.

    Each dataset keeps its own frames per second, statistics, state bins and longest episode; what a sample lacks is padded and
    masked as by `DatasetSamples`. Cameras have slots by name: those of the first dataset, then new ones of the others.

    With weights every dataset is a group of its own. Without them all are one, and each frame is drawn once per epoch.

    Args:
        fast: the FAST tokenizer that a policy has learned; by default one is trained on what is drawn.
        cameras: names of the slots that a policy has learned. Where no camera has one of these names, and by default, the slots
            are those of the datasets.

    Raises:
        DataError: a dataset's state or action is wider than the policy's, or a statistic is missing or not finite.
        ConfigurationError: the prompt or the actions do not fit the policy's vocabularies.
    """

    def __init__(
        self,
        members: Sequence[MixtureDataset],
        spec: BatchSpec,
        seed: int,
        tokenizer: Path | None = None,
        *,
        fast: FastTokenizer | None = None,
        cameras: Sequence[str] = (),
    ) -> None:
        self.members = tuple(members)
        settings = [member.settings for member in members]
        self.provenance = Provenance(
            tuple(setting.path for setting in settings),
            tuple(dict.fromkeys(setting.source_name for setting in settings)),
            tuple(dict.fromkeys(setting.control_mode for setting in settings)),
        )
        slots = camera_slots(members)
        self.cameras = (slots if set(slots).isdisjoint(cameras) else tuple(cameras))[: spec.cameras]
        self.shares = drawn_shares(members)
        lengths = [len(member.dataset) for member in members]
        self._starts = [0, *np.cumsum(lengths).tolist()]
        self._parts = [
            DatasetSamples(member.dataset, spec, seed, tokenizer, membership=self._membership(number))
            for number, member in enumerate(members)
        ]
        self.fast = fast
        if spec.fast_tokens:
            self.fast = fast or FastTokenizer.train(self._fast_chunks(), horizon=spec.horizon, vocab=spec.fast_vocab)
            for part in self._parts:
                part.fast = self.fast

    def __len__(self) -> int:
        """Return the number of frames, those that are not drawn included."""
        return int(self._starts[-1])

    @property
    def statistics(self) -> list[Statistics]:
        """Statistics of state and action, one mapping per dataset, of all its episodes."""
        return [statistics for part in self._parts for statistics in part.statistics]

    @property
    def decoder(self) -> str | None:
        """Decoders of the datasets' videos, None if they have none."""
        return ", ".join(dict.fromkeys(part.decoder for part in self._parts if part.decoder)) or None

    def describe_blind_datasets(self) -> list[str]:
        """Return a line for each dataset that has cameras of which none is in a slot: all its images are black."""
        lines = []
        for member in self.members:
            slots = [slot_name(camera, member.settings) for camera in member.dataset.cameras]
            if slots and self.cameras and set(slots).isdisjoint(self.cameras):
                lines.append(
                    f"{member.settings.path}: all images of this dataset are black: the policy's cameras are "
                    f"{', '.join(self.cameras)}, and its own {', '.join(slots)}; rename them, or raise cams"
                )
        return lines

    def describe_long_prompts(self) -> list[str]:
        """Return a line for each dataset with prompts that may not fit whole."""
        lines = [
            (member.settings.path, part.describe_long_prompts()) for member, part in zip(self.members, self._parts, strict=True)
        ]
        return [f"{path}: {line}" for path, line in lines if line is not None]

    def describe_long_targets(self) -> list[str]:
        """Return lines on each dataset's other texts that do not fit whole: those to learn, and metadata."""
        return [
            f"{member.settings.path}: {line}"
            for member, part in zip(self.members, self._parts, strict=True)
            for line in part.describe_long_targets()
        ]

    def groups(self) -> list[SampleGroup]:
        """Frames that are trained on: one group per dataset if they have weights, otherwise one."""
        segments = [member.selection.training + start for member, start in self._members_with_start()]
        weights = [member.settings.weight for member in self.members]
        if None in weights:
            return [SampleGroup(np.concatenate(segments))]
        return [SampleGroup(own, weight) for own, weight in zip(segments, weights, strict=True) if weight is not None]

    def validation_segments(self, numbers: Collection[int] | None = None) -> np.ndarray:
        """Frames of the episodes that are not trained on, as segments (n, 2) int64 of consecutive frames.

        Args:
            numbers: of the datasets that they are of; None: of all.
        """
        return self._segments("validation", numbers)

    def training_segments(self, numbers: Collection[int] | None = None) -> np.ndarray:
        """Frames of the episodes that are trained on, as `validation_segments`."""
        return self._segments("training", numbers)

    def _segments(self, part: Literal["training", "validation"], numbers: Collection[int] | None) -> np.ndarray:
        return np.concatenate(
            [
                getattr(member.selection, part) + start
                for number, (member, start) in enumerate(self._members_with_start())
                if numbers is None or number in numbers
            ]
        )

    def episode_of(self, index: int) -> tuple[int, int]:
        """Return the dataset of a sample, and its episode."""
        number = bisect_right(self._starts, index) - 1
        return number, self.members[number].dataset.episode_of(index - self._starts[number]).index

    def sample(self, epoch: int, index: int) -> Batch:
        """Return a row of the batch table. Only the fields from `draw_random_fields` depend on the epoch."""
        number = bisect_right(self._starts, index) - 1
        return self._parts[number].sample(epoch, index - self._starts[number])

    def samples(self, keys: Sequence[SampleKey]) -> list[Batch]:
        """Return the rows of the batch table of `keys`, in their order, stacked in several parts.

        A part has the consecutive frames of an episode, which are made together: several times faster than one by one.
        """
        parts, start = [], 0
        while start < len(keys):
            key = keys[start]
            number = bisect_right(self._starts, key.index) - 1
            index = key.index - self._starts[number]
            limit = min(len(keys) - start, self.members[number].dataset.episode_of(index).to_index - index)
            rows = 1
            while rows < limit and keys[start + rows] == SampleKey(key.epoch, key.index + rows):
                rows += 1
            parts.append(self._parts[number].samples(key.epoch, index, index + rows))
            start += rows
        return parts

    def _members_with_start(self) -> Iterator[tuple[MixtureDataset, int]]:
        return zip(self.members, self._starts, strict=False)  # the last start is the end

    def _membership(self, number: int) -> Membership:
        member = self.members[number]
        cameras = {slot_name(camera, member.settings): camera for camera in member.dataset.cameras}
        return Membership(
            dataset=number,
            source=self.provenance.sources.index(member.settings.source_name),
            control_mode=self.provenance.control_modes.index(member.settings.control_mode),
            first=self._starts[number],
            cameras=tuple(cameras.get(slot) for slot in self.cameras),
        )

    def _fast_chunks(self) -> Iterator[np.ndarray]:
        """Yield chunks of actions that are trained on, of every dataset as many as its share of the drawn samples."""
        for part, member, share in zip(self._parts, self.members, self.shares, strict=True):
            group = SampleGroup(member.selection.training)
            for position in evenly_distributed(len(group), max(1, round(FAST_CHUNKS * share))):
                yield part.chunk(group.index_of(position))


def camera_slots(members: Sequence[MixtureDataset]) -> tuple[str, ...]:
    """Return the names of all cameras: those of the first dataset, then new ones of the others."""
    return tuple(dict.fromkeys(slot_name(camera, member.settings) for member in members for camera in member.dataset.cameras))


def drawn_shares(members: Sequence[MixtureDataset]) -> list[float]:
    """Return the share of every dataset in the samples that are drawn: by weight, or by frame without weights."""
    sizes = [
        count_frames(member.selection.training) if member.settings.weight is None else member.settings.weight
        for member in members
    ]
    return [size / sum(sizes) for size in sizes]


def slot_name(camera: str, settings: DatasetSpec) -> str:
    """Return the name of a camera's slot: its own, unless it is renamed."""
    return dict(settings.rename).get(camera, camera)
