"""Reader of LeRobot datasets: tables by pyarrow, videos by PyAV. Only requested frames and columns are decoded."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchbox.data.dataset.images import ImageColumns
from benchbox.data.format.language import PERSISTENT, STYLES, PersistentTexts
from benchbox.data.format.layouts.reading import read_metadata
from benchbox.data.format.metadata import ACTION, IMAGE_PREFIX, STATE, SUBTASKS, DatasetMetadata, Episode, Statistics
from benchbox.data.format.missing_statistics import complete_statistics
from benchbox.data.format.tables import TableCache
from benchbox.data.video.decoders import PYAV, open_reader
from benchbox.data.video.files import VideoCache, key_frame_interval
from benchbox.errors import DataError
from benchbox.spec.datasets import is_camera

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from benchbox.data.video.files import FrameCounts

RESPONSE = "response"
SUBTASK = "subtask_index"
MAX_TIME_S = 1e9  # in a video; times beyond overflow the units of video files


def open_dataset(root: Path | str) -> LeRobotDataset:
    """Open a LeRobot dataset (v2.0, v2.1 or v3.0) on disk.

    Raises:
        DataError: it is not a dataset, has an unsupported version, is damaged, or lacks state or action.
    """
    return LeRobotDataset(read_metadata(Path(root)))


def open_training_dataset(
    root: Path | str, on_progress: Callable[[int, int], None] = lambda _, __: None, *, cache: bool = True
) -> tuple[LeRobotDataset, Path | None]:
    """Open a dataset whose state and action have the statistics of every normalisation: see `complete_statistics`.

    Args:
        cache: whether computed statistics are stored; otherwise nothing is written.

    Returns:
        The dataset, and the file in which the statistics that it does not have stored are cached, if there are any.

    Raises:
        DataError: as `open_dataset`, or a data file is missing or damaged.
    """
    dataset = open_dataset(root)
    statistics, cached_in = complete_statistics(dataset.metadata, on_progress, cache=cache)
    return LeRobotDataset(replace(dataset.metadata, statistics=statistics)), cached_in


def _first_time_s(metadata: DatasetMetadata, video: Path) -> float:
    """Return the time of the first frame of a dataset in a video file."""
    spans = (span for episode in metadata.episodes for span in episode.videos.values())
    return min(span.from_s for span in spans if span.path == video)


class LeRobotDataset:
    """Frames by their index over all episodes. `ds[i]` decodes frame i of every camera; the other methods read parts of it.

    It may be pickled or forked into other processes, which never share open files.
    """

    def __init__(self, metadata: DatasetMetadata, decoder: str = PYAV) -> None:
        self.metadata = metadata
        self.decoder = decoder  # of videos
        self._starts = [episode.from_index for episode in metadata.episodes]
        self._length = metadata.episodes[-1].to_index if metadata.episodes else 0
        camera_features = [name for name, feature in metadata.features.items() if is_camera(feature)]
        self._camera_features = {name.removeprefix(IMAGE_PREFIX): name for name in camera_features}
        self._tables = TableCache(metadata)
        self._persistent_texts = PersistentTexts(self._tables.locate) if PERSISTENT in metadata.features else None
        self._videos = VideoCache(metadata.fps, partial(open_reader, decoder), partial(_first_time_s, metadata))
        self._images = ImageColumns(
            metadata.root, [name for name in camera_features if metadata.features[name]["dtype"] == "image"]
        )

    @property
    def root(self) -> Path:
        return self.metadata.root

    @property
    def info(self) -> dict[str, Any]:
        """Content of `meta/info.json`."""
        return self.metadata.info

    @property
    def fps(self) -> float:
        return self.metadata.fps

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        return self.metadata.features

    @property
    def cameras(self) -> tuple[str, ...]:
        """Camera names, in the order `meta/info.json` lists them."""
        return tuple(self._camera_features)

    def camera_feature(self, camera: str) -> str:
        """Return the name of a camera's feature."""
        return self._camera_features[camera]

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the text features, in the order `meta/info.json` lists them."""
        return tuple(name for name, feature in self.features.items() if feature["dtype"] == "string")

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task texts, in the order of their index."""
        return tuple(text for _, text in sorted(self.metadata.tasks.items()))

    @property
    def subtasks(self) -> tuple[str, ...]:
        """Subtask texts, in the order of their index; none in most datasets."""
        return tuple(text for _, text in sorted(self.metadata.subtasks.items()))

    @property
    def episodes(self) -> tuple[Episode, ...]:
        return self.metadata.episodes

    @property
    def statistics(self) -> Statistics:
        """Feature -> statistic -> values; image statistics are shaped (3, 1, 1) on the scale [0, 1]."""
        return self.metadata.statistics

    @property
    def frame_counts(self) -> FrameCounts:
        """Frames of videos that this process decoded, and those of them that it used."""
        return self._videos.counts

    def key_frame_interval(self) -> int | None:
        """Return the largest distance of key frames in the first video, None without videos or with one key frame."""
        paths = [span.path for episode in self.episodes[:1] for span in episode.videos.values()]
        return key_frame_interval(paths[0]) if paths else None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return frame `index`: `observation.state` and `action` float32 (D,), `observation.images.<cam>` uint8 (3, H, W),
        `episode_index`, `frame_index`, `timestamp` (seconds from the start of the episode), `task` (text).

        Raises:
            DataError: there is no such frame, or its files are missing or damaged.
        """
        episode = self.episode_of(index)
        item: dict[str, Any] = {name: torch.tensor(self.column(name, index, index + 1)[0]) for name in (STATE, ACTION)}
        item |= {feature: self.image(camera, index) for camera, feature in self._camera_features.items()}
        return item | {
            "episode_index": episode.index,
            "frame_index": index - episode.from_index,
            "timestamp": float(self.column("timestamp", index, index + 1)[0, 0]),
            "task": self.task(index),
        }

    def episode_of(self, index: int) -> Episode:
        """Return the episode of frame `index`."""
        if not 0 <= index < len(self):
            raise DataError(f"{self.root}: no frame {index}; the dataset has {len(self)}, counted from 0")
        return self.episodes[bisect_right(self._starts, index) - 1]

    def locate(self, episode: Episode) -> tuple[Path, int]:
        """Return the data file of an episode, and the number of its first row there: see `TableCache.locate`."""
        return self._tables.locate(episode)

    def task(self, index: int) -> str:
        """Return the task text of frame `index`."""
        return self._look_up_text("task", int(self.column("task_index", index, index + 1)[0, 0]), index)

    def has_text(self, name: str) -> bool:
        """Return whether the dataset has the text `name` of `text`, though perhaps not in every frame.

        A column of LeRobot 0.6 counts as one, whatever its annotations are.
        """
        is_persistent = self._persistent_texts is not None and name in STYLES
        return name in self.texts or is_persistent or (name == RESPONSE and SUBTASK in self.features)

    def text(self, name: str, index: int) -> str:
        """Return the text feature `name` of frame `index`, or an empty string if there is no such feature.

        Without features of these names, `response` is the subtask and `memory` the memory in force at the frame, as LeRobot
        0.6 stores them (`benchbox.data.format.language`). Without those columns, the response is the frame's subtask as stored
        by LeRobot 0.4.4 to 0.5: column `subtask_index` (negative: no subtask), texts in `meta/subtasks.parquet`.
        """
        if name in self.texts:
            return str(self.column(name, index, index + 1)[0, 0])
        if self._persistent_texts is not None and name in STYLES:
            time_s = float(self.column("timestamp", index, index + 1)[0, 0])
            return self._persistent_texts.text(self.episode_of(index), STYLES[name], time_s)
        if name != RESPONSE or SUBTASK not in self.features:
            return ""
        number = int(self.column(SUBTASK, index, index + 1)[0, 0])
        return self._look_up_text("subtask", number, index) if number >= 0 else ""

    def subtask_end(self, index: int) -> int:
        """Return the last frame of the consecutive frames from `index` on with the same response, which must not be empty."""
        episode = self.episode_of(index)
        if self._persistent_texts is not None and RESPONSE not in self.texts:
            times_s = self.column("timestamp", index, episode.to_index)[:, 0].tolist()
            column = np.array([self._persistent_texts.text(episode, STYLES[RESPONSE], time_s) for time_s in times_s])
        else:
            column = self.column(RESPONSE if RESPONSE in self.texts else SUBTASK, index, episode.to_index)[:, 0]
        changes = np.flatnonzero(column != column[0])
        return index + int(changes[0]) - 1 if len(changes) else episode.to_index - 1

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the values (stop - start, D) of frames `start` up to `stop` (exclusive), which are of one episode.

        State and action are float32 and finite.

        Raises:
            DataError: the data file is missing or damaged, ends before the frames do, or has values that are not finite.
        """
        episode = self.episode_of(start)
        rows = self._tables.rows(episode, name, start, stop)
        if len(rows) != stop - start:
            raise DataError(f"{self.locate(episode)[0]}: ends before frame {stop - 1}, which episode {episode.index} lists")
        if name in (STATE, ACTION) and not (finite := np.isfinite(rows).all(axis=1)).all():
            path, row = self._row_of(episode, start + int(finite.argmin()))
            raise DataError(
                f"{path}: {name} of episode {episode.index} has values that are not finite: row {row}; "
                "correct them, or record the episode again"
            )
        return rows

    def image(self, camera: str, index: int) -> Tensor:
        """Return frame `index` of a camera, (3, H, W) uint8 RGB."""
        return torch.from_numpy(self.pixels(camera, index)).permute(2, 0, 1).contiguous()

    def pixels(self, camera: str, index: int) -> np.ndarray:
        """Return frame `index` of a camera, (H, W, 3) uint8 RGB."""
        episode, feature = self.episode_of(index), self._camera_features[camera]
        if feature in episode.videos:
            span = episode.videos[feature]
            time_s = span.from_s + float(self.column("timestamp", index, index + 1)[0, 0])
            if not 0 <= time_s < MAX_TIME_S:
                path, row = self._row_of(episode, index)
                raise DataError(f"{path}: row {row}: timestamp is {time_s:g}, and seconds are expected")
            return self._videos.open(span.path).frame_at(time_s)
        path, row = self._row_of(episode, index)
        return self._images.image(path, feature, row)

    def __reduce__(self) -> tuple[type[LeRobotDataset], tuple[DatasetMetadata, str]]:
        return LeRobotDataset, (self.metadata, self.decoder)

    def _row_of(self, episode: Episode, index: int) -> tuple[Path, int]:
        path, first_row = self.locate(episode)
        return path, first_row + index - episode.from_index

    def _look_up_text(self, kind: str, number: int, frame: int) -> str:
        metadata = self.metadata
        texts, path = (metadata.tasks, metadata.tasks_file) if kind == "task" else (metadata.subtasks, metadata.root / SUBTASKS)
        if number not in texts:
            raise DataError(f"{path}: no {kind} {number}, which frame {frame} names")
        return texts[number]
