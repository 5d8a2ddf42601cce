"""Reading LeRobot datasets: tables by pyarrow, videos by PyAV, and nothing decoded that was not asked for."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from benchbox.data.metadata import IMAGE_PREFIX, Episode, Metadata, Statistics, read_metadata, read_table
from benchbox.data.video import VideoReader
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

STATE = "observation.state"
ACTION = "action"
RESPONSE = "response"
SUBTASK = "subtask_index"

OPEN_TABLES = 8  # data files whose columns stay in memory
OPEN_VIDEOS = 32  # files kept open with their place in them


def open_dataset(root: Path | str) -> LeRobotDataset:
    """A LeRobot dataset on disk (v3.0).

    Raises:
        DataError: not a dataset, a version this does not read, damaged, or without state or action.
    """
    return LeRobotDataset(read_metadata(Path(root)))


class LeRobotDataset:
    """Frames by their index over all episodes. `ds[i]` decodes frame i of every camera; the other methods read parts of it.

    It may be sent to, or forked into, other processes: open files are never shared between them.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._starts = [episode.from_index for episode in metadata.episodes]
        self._length = metadata.episodes[-1].to_index if metadata.episodes else 0
        for name, feature in metadata.features.items():
            if feature["dtype"] == "image":
                raise DataError(f"{metadata.root}: {name} is stored as images in the table; only video can be read")
        for name in (STATE, ACTION):
            if name not in metadata.features:
                raise DataError(f"{metadata.root / 'meta/info.json'}: the dataset has no feature {name!r}")
        self._features = {
            name.removeprefix(IMAGE_PREFIX): name for name, feature in metadata.features.items() if feature["dtype"] == "video"
        }
        self._process = os.getpid()
        self._tables: OrderedDict[Path, tuple[int, dict[str, np.ndarray]]] = OrderedDict()
        self._videos: OrderedDict[Path, VideoReader] = OrderedDict()

    @property
    def root(self) -> Path:
        return self._metadata.root

    @property
    def info(self) -> dict[str, Any]:
        """`meta/info.json` as it is."""
        return self._metadata.info

    @property
    def fps(self) -> float:
        return self._metadata.fps

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        return self._metadata.features

    @property
    def cameras(self) -> tuple[str, ...]:
        """Camera names, in the order `meta/info.json` lists them."""
        return tuple(self._features)

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the features that are text, likewise."""
        return tuple(name for name, feature in self.features.items() if feature["dtype"] == "string")

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task texts, in the order of their index."""
        return tuple(text for _, text in sorted(self._metadata.tasks.items()))

    @property
    def subtasks(self) -> tuple[str, ...]:
        """Subtask texts, likewise; none in most datasets."""
        return tuple(text for _, text in sorted(self._metadata.subtasks.items()))

    @property
    def episodes(self) -> tuple[Episode, ...]:
        return self._metadata.episodes

    @property
    def statistics(self) -> Statistics:
        """Feature -> statistic -> values; image statistics are shaped (3, 1, 1) on the scale [0, 1]."""
        return self._metadata.statistics

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Frame `index`: `observation.state` and `action` float32 (D,), `observation.images.<cam>` uint8 (3, H, W),
        `episode_index`, `frame_index`, `timestamp` (seconds from the start of the episode), `task` (text).

        Raises:
            DataError: no such frame, or its files are missing or damaged.
        """
        episode = self.episode_of(index)
        item: dict[str, Any] = {name: torch.tensor(self.column(name, index, index + 1)[0]) for name in (STATE, ACTION)}
        item |= {feature: self.image(camera, index) for camera, feature in self._features.items()}
        return item | {
            "episode_index": episode.index,
            "frame_index": index - episode.from_index,
            "timestamp": float(self.column("timestamp", index, index + 1)[0, 0]),
            "task": self.task(index),
        }

    def episode_of(self, index: int) -> Episode:
        """The episode that frame `index` belongs to."""
        if not 0 <= index < len(self):
            raise DataError(f"{self.root}: no frame {index}; the dataset has {len(self)}, counted from 0")
        return self.episodes[bisect_right(self._starts, index) - 1]

    def task(self, index: int) -> str:
        """What the robot was told to do in frame `index`."""
        return self._numbered("task", self._metadata.tasks, int(self.column("task_index", index, index + 1)[0, 0]), index)

    def text(self, name: str, index: int) -> str:
        """What text feature `name` says in frame `index`; empty where there is no such feature.

        Without a feature `response` it is the subtask of the frame, as LeRobot 0.4.4 to 0.5 keeps it: column `subtask_index`,
        texts in `meta/subtasks.parquet`, none below 0. The annotations of later ones (`language_persistent`) are not read.
        """
        if name in self.texts:
            return str(self.column(name, index, index + 1)[0, 0])
        if name != RESPONSE or SUBTASK not in self.features:
            return ""
        number = int(self.column(SUBTASK, index, index + 1)[0, 0])
        return self._numbered("subtask", self._metadata.subtasks, number, index) if number >= 0 else ""

    def subtask_end(self, index: int) -> int:
        """The last frame, from `index` on, of an unbroken run of frames with the same response, which is not empty."""
        episode = self.episode_of(index)
        column = self.column(RESPONSE if RESPONSE in self.texts else SUBTASK, index, episode.to_index)[:, 0]
        changed = np.flatnonzero(column != column[0])
        return index + int(changed[0]) - 1 if len(changed) else episode.to_index - 1

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        """Values of frames `start` up to, not including, `stop`, all of one episode: (stop - start, D). State and action are
        float32.
        """
        episode = self.episode_of(start)
        first, columns = self._table(episode.data_file)
        if name not in columns:
            columns[name] = self._read_column(episode.data_file, name)
        rows: np.ndarray = columns[name][start - first : stop - first]
        if len(rows) != stop - start:
            raise DataError(f"{episode.data_file}: ends before frame {stop - 1}, which episode {episode.index} lists")
        return rows

    def image(self, camera: str, index: int) -> Tensor:
        """Frame `index` of a camera, (3, H, W) uint8 RGB."""
        episode = self.episode_of(index)
        span = episode.videos[self._features[camera]]
        time_s = span.from_s + float(self.column("timestamp", index, index + 1)[0, 0])
        pixels = self._video(span.path).frame_at(time_s)
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    def __reduce__(self) -> tuple[type[LeRobotDataset], tuple[Metadata]]:
        return LeRobotDataset, (self._metadata,)

    def _numbered(self, kind: str, texts: dict[int, str], number: int, index: int) -> str:
        if number not in texts:
            raise DataError(f"{self.root / f'meta/{kind}s.parquet'}: no {kind} {number}, which frame {index} names")
        return texts[number]

    def _table(self, path: Path) -> tuple[int, dict[str, np.ndarray]]:
        """The index of the file's first row, and the columns of it read so far."""
        if path not in self._tables:
            index = self._read_column(path, "index")[:, 0]
            if len(index) == 0 or not np.array_equal(index, np.arange(index[0], index[0] + len(index))):
                raise DataError(f"{path}: its rows are not consecutive frames")
            self._tables[path] = (int(index[0]), {})
        self._tables.move_to_end(path)
        while len(self._tables) > OPEN_TABLES:
            self._tables.popitem(last=False)
        return self._tables[path]

    def _read_column(self, path: Path, name: str) -> np.ndarray:
        column = read_table(path, [name]).column(name).combine_chunks()
        if name in self.texts:
            column = column.fill_null("")
        if column.null_count:
            raise DataError(f"{path}: column {name!r} has missing values")
        nested = pa.types.is_nested(column.type)
        flat: np.ndarray = (column.flatten() if nested else column).to_numpy(zero_copy_only=False)
        shape = self.features[name]["shape"]
        if flat.size != len(column) * int(np.prod(shape)):
            raise DataError(f"{path}: the values of {name!r} are not of the shape {shape} that info.json states")
        rows = flat.reshape(len(column), -1)
        return rows.astype(np.float32) if name in (STATE, ACTION) else rows

    def _video(self, path: Path) -> VideoReader:
        if self._process != os.getpid():  # forked: the files opened before are the parent's, and share its position
            self._process = os.getpid()
            self._videos = OrderedDict()
        if path not in self._videos:
            self._videos[path] = VideoReader(path, self.fps)
        self._videos.move_to_end(path)
        while len(self._videos) > OPEN_VIDEOS:
            self._videos.popitem(last=False)[1].close()
        return self._videos[path]
