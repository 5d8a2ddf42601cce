"""Selection of a dataset's frames: those that a keep file names, divided by episode into training and validation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.order.randomness import SPLIT, generator
from benchbox.data.samples.keep import read_keep_ranges
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.data.format.metadata import Episode


@dataclass(frozen=True)
class FrameSelection:
    """Frames of one dataset that are drawn: segments (n, 2) int64 of consecutive frames, each of one episode."""

    training: np.ndarray
    validation: np.ndarray
    frames: int  # of the dataset
    episodes: int  # of the dataset
    training_episodes: int
    validation_episodes: int

    @property
    def kept_frames(self) -> int:
        return count_frames(self.training) + count_frames(self.validation)

    @property
    def kept_episodes(self) -> int:
        """Number of episodes with at least one frame that is drawn."""
        return self.training_episodes + self.validation_episodes

    @property
    def kept(self) -> str:
        """Count of the frames that a keep file keeps, in words."""
        return f"keeps {self.kept_frames:,} of {self.frames:,} frames in {self.kept_episodes:,} of {self.episodes:,} episodes"


def select_frames(
    episodes: Sequence[Episode],
    keep: str | None = None,
    *,
    validation: float = 0.0,
    seed: int = 0,
    dataset: int = 0,
    divided: np.ndarray | None = None,
) -> FrameSelection:
    """Select the frames of a dataset.

    Episodes are divided by the seed and the dataset's number alone, so equally on every rank and in every run of a seed.

    Args:
        keep: file of ranges, see `benchbox.data.samples.keep`.
        validation: share of the episodes that is not trained on.
        dataset: number of the dataset in its mixture.
        divided: the episodes to divide (n,), counted over those with frames, where further entries of the mixture draw from
            the same dataset: by default those that `keep` has frames of.

    Raises:
        DataError: the keep file is missing or damaged.
        ConfigurationError: it names frames that the dataset does not have.
    """
    segments, episode_of = _kept_segments(episodes, keep)
    used = np.unique(episode_of)
    number = sum(1 for episode in episodes if episode.length)
    chosen = validation_episodes(used if divided is None else divided, number, validation, seed, dataset)
    chosen = chosen[np.isin(chosen, used)]
    is_validation = np.isin(episode_of, chosen)
    return FrameSelection(
        training=segments[~is_validation],
        validation=segments[is_validation],
        frames=episodes[-1].to_index if episodes else 0,
        episodes=len(episodes),
        training_episodes=len(used) - len(chosen),
        validation_episodes=len(chosen),
    )


def used_episodes(episodes: Sequence[Episode], keeps: Sequence[str | None]) -> np.ndarray:
    """Return the episodes that at least one of several selections of a dataset has frames of."""
    return np.unique(np.concatenate([_kept_segments(episodes, keep)[1] for keep in dict.fromkeys(keeps)]))


def _kept_segments(episodes: Sequence[Episode], keep: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the segments (n, 2) that are drawn, and the episode of each (n,), counted over those with frames."""
    if keep is None:
        segments = np.array([(e.from_index, e.to_index) for e in episodes if e.length], dtype=np.int64).reshape(-1, 2)
    else:
        segments = read_keep_ranges(Path(keep), episodes)
    starts = np.array([episode.from_index for episode in episodes if episode.length], dtype=np.int64)
    return segments, np.searchsorted(starts, segments[:, 0], side="right") - 1


def validation_episodes(used: np.ndarray, episodes: int, fraction: float, seed: int, dataset: int = 0) -> np.ndarray:
    """Choose the episodes of `used` that are not trained on: at least one of two, and never all.

    An episode keeps its place in the seeded order whatever is used of the others.
    """
    if fraction <= 0 or len(used) < 2:
        return used[:0]
    number = min(len(used) - 1, max(1, round(len(used) * fraction)))
    order = generator(SPLIT, seed, dataset).permutation(episodes)
    return np.sort(order[np.isin(order, used)][:number])


def count_frames(segments: np.ndarray) -> int:
    """Return the number of frames in segments (n, 2)."""
    return int((segments[:, 1] - segments[:, 0]).sum())


def check_not_empty(selection: FrameSelection, name: str) -> None:
    """Raise DataError if no frame of a dataset is trained on."""
    if not len(selection.training):
        reason = "all episodes that it draws from are validated: keep frames of more of them"
        raise DataError(f"{name}: {reason if len(selection.validation) else 'the dataset has no frames'}")
