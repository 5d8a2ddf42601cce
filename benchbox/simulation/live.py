"""Observations of a running episode as rows of a batch, made by the code that makes the samples of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.dataset.lerobot import LeRobotDataset, open_dataset, open_training_dataset
from benchbox.data.format.metadata import ACTION, IMAGE_PREFIX, STATE, Episode
from benchbox.data.sample import sample_path
from benchbox.data.samples.windows import DatasetSamples
from benchbox.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from benchbox.data.format.metadata import DatasetMetadata
    from benchbox.registry.contracts import BatchSpec
    from benchbox.simulation.environment import EnvironmentFrame
    from benchbox.spec.cell import DataSpec


class LiveEpisode(LeRobotDataset):
    """A running episode in the form of a dataset with one episode, which grows by a frame per observation.

    Args:
        metadata: of the dataset that the policy was trained on, whose cameras, statistics and sizes it has.
        task: the instruction.
    """

    def __init__(self, metadata: DatasetMetadata, task: str) -> None:
        super().__init__(metadata)
        self._task = task
        self._observations: list[EnvironmentFrame] = []

    def append(self, observation: EnvironmentFrame) -> None:
        """Add the newest frame."""
        self._observations.append(observation)

    def __len__(self) -> int:
        return len(self._observations)

    def episode_of(self, index: int) -> Episode:  # noqa: ARG002 (there is one episode)
        return Episode(
            index=0,
            from_index=0,
            to_index=len(self),
            tasks=(self._task,),
            data_file=self.root,
            first_row=0,
            videos={},
        )

    def task(self, index: int) -> str:  # noqa: ARG002
        return self._task

    def text(self, name: str, index: int) -> str:  # noqa: ARG002
        """Return no text: nobody writes subtasks or memories while a policy acts."""
        return ""

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the states, or zeros in place of the actions, which are not known yet."""
        if name == STATE:
            return np.stack([observation.state for observation in self._observations[start:stop]])
        return np.zeros((stop - start, int(np.prod(self.features[name]["shape"]))), np.float32)

    def pixels(self, camera: str, index: int) -> np.ndarray:
        return self._observations[index].images[camera]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveInputs:
    """Everything that turns observations into inputs of a policy: its spec, and the dataset that it was trained on."""

    dataset: LeRobotDataset
    spec: BatchSpec
    tokenizer: Path | None
    seed: int  # of the training: with that of an episode, it determines the noise that actions are denoised from

    @property
    def cameras(self) -> tuple[str, ...]:
        """Cameras that the policy sees, in its order."""
        return self.dataset.cameras[: self.spec.cameras]

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the first camera's images in pixels, as an environment is asked for them."""
        return self.camera_size(self.cameras[0]) if self.cameras else (64, 64)

    def camera_size(self, camera: str) -> tuple[int, int]:
        """Return height and width of a camera's images in the dataset in pixels, before they are resized for the policy."""
        features = self.dataset.features.items()
        shape = next(feature["shape"] for name, feature in features if name.removeprefix(IMAGE_PREFIX) == camera)
        height, width = shape[1:] if shape[0] == 3 and shape[2] != 3 else shape[:2]  # LeRobot has both orders
        return height, width

    @property
    def state_dim(self) -> int:
        """Number of the dataset's state dimensions, without padding."""
        return int(np.prod(self.dataset.features[STATE]["shape"]))

    @property
    def action_dim(self) -> int:
        """Number of the dataset's action dimensions, without padding."""
        return int(np.prod(self.dataset.features[ACTION]["shape"]))

    def begin(self, task: str, number: int) -> EpisodeInputs:
        """Return the inputs of an episode; its noise depends on its number and on the frame."""
        return EpisodeInputs(self, LiveEpisode(self.dataset.metadata, task), number)


class EpisodeInputs:
    """Inputs of the policy in one episode."""

    def __init__(self, inputs: LiveInputs, episode: LiveEpisode, number: int) -> None:
        self._episode = episode
        self._number = number
        self._fields = inputs.spec.fields(acting=True)
        self._samples = DatasetSamples(episode, inputs.spec, inputs.seed, inputs.tokenizer)

    def append(self, observations: Sequence[EnvironmentFrame]) -> None:
        """Add the newest frames."""
        for observation in observations:
            self._episode.append(observation)

    def row(self) -> dict[str, Tensor]:
        """Return the row of a batch for the newest frame: the fields that are available before acting."""
        sample = self._samples.sample(self._number, len(self._episode) - 1)
        return {name: sample[name] for name in self._fields}


def open_inputs(data: DataSpec, spec: BatchSpec, seed: int) -> LiveInputs:
    """Open what a policy that was trained on `data` needs to act.

    Raises:
        DataError: the dataset is missing or damaged.
        UnsupportedError: the policy was trained on generated noise or on several datasets.
    """
    if data.kind == "sample":
        dataset = open_dataset(sample_path())
    elif data.kind == "lerobot" and len(data.lerobot_datasets) == 1:
        settings = data.lerobot_datasets[0]
        if settings.rename:
            raise UnsupportedError(f"{settings.path}: its cameras are renamed, which eval cannot do yet")
        dataset = open_training_dataset(settings.path)[0]
    else:
        kind = "several datasets" if data.kind == "lerobot" else "generated samples"
        raise UnsupportedError(f"the policy was trained on {kind}: eval takes its normalisation from one LeRobot dataset")
    return LiveInputs(dataset=dataset, spec=spec, tokenizer=data.tokenizer_file, seed=seed)
