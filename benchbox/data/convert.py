"""Conversion of LeRobot datasets between layouts. Tables keep their values, and videos are copied where they can be."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchbox.data import statistics
from benchbox.data.layouts import v2, v30
from benchbox.data.layouts.layout import FILES_PER_CHUNK, WrittenDataset, WrittenEpisode
from benchbox.data.lerobot import LeRobotDataset, open_training_dataset
from benchbox.data.metadata import IMAGE_PREFIX, SUBTASKS
from benchbox.data.remux import VideoCopier
from benchbox.data.writer import DATA_FILE_MIB, LAYOUTS, VIDEO_FILE_MIB
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchbox.data.layouts.layout import Layout
    from benchbox.data.metadata import Episode, Statistics

_SAMPLED_IMAGES = 100  # of an episode and camera whose statistics are not stored
_LAYOUT_KEYS = ("total_chunks", "total_videos", "data_files_size_in_mb", "video_files_size_in_mb", "data_path", "video_path")


@dataclass(frozen=True, slots=True)
class Conversion:
    """Result of a conversion: videos of episodes that were copied, and those that had to be encoded again."""

    copied: int
    encoded: int


def convert(
    source: Path, target: Path, version: str, on_progress: Callable[[int, int], None] = lambda _, __: None
) -> Conversion:
    """Write a dataset in another layout: v3.0 or v2.1. `on_progress` is called with the number of episodes done, and of all.

    The dataset appears as `target` when it is complete.

    Raises:
        DataError: `target` exists, `source` is damaged, or has that layout already.
    """
    if target.exists():
        raise DataError(f"{target}: exists already; name another folder or remove it")
    dataset, _ = open_training_dataset(source)
    if version not in LAYOUTS:
        raise DataError(f"no dataset is written as {version!r}; {' or '.join(LAYOUTS)}")
    if dataset.info["codebase_version"] == version:
        raise DataError(f"{source}: is a dataset of {version} already")
    tasks = dict(sorted(dataset.metadata.tasks.items()))
    if list(tasks) != list(range(len(tasks))):
        raise DataError(f"{source}: its task indices are {list(tasks)}, and are expected to count from 0")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        conversion = _write(dataset, folder, LAYOUTS[version], list(tasks.values()), on_progress)
        folder.chmod(0o755)  # a temporary folder is private
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return conversion


def _write(
    dataset: LeRobotDataset, folder: Path, layout: Layout, tasks: Sequence[str], on_progress: Callable[[int, int], None]
) -> Conversion:
    limits: dict[str, float] = {"data_files_size_in_mb": DATA_FILE_MIB, "video_files_size_in_mb": VIDEO_FILE_MIB}
    tables = _TableCopier(folder, layout, DATA_FILE_MIB)
    videos = [name for name, feature in dataset.features.items() if feature["dtype"] == "video"]
    copiers = {name: VideoCopier(folder, name, fps=dataset.fps, layout=layout, limit_mib=VIDEO_FILE_MIB) for name in videos}
    stored = _stored_statistics(dataset)
    episodes = []
    for number, episode in enumerate(dataset.episodes):
        written = WrittenEpisode(
            index=number,
            tasks=episode.tasks,
            from_index=episode.from_index,
            length=episode.length,
            data_file=tables.append(episode, number),
            videos={name: copier.append(episode.videos[name], episode.length) for name, copier in copiers.items()},
            statistics=_episode_statistics(dataset, episode, stored.get(episode.index, {})),
        )
        episodes.append(written)
        on_progress(number + 1, len(dataset.episodes))
    tables.close()
    for copier in copiers.values():
        copier.close()
    info = {key: value for key, value in dataset.info.items() if key not in _LAYOUT_KEYS} | {
        "codebase_version": layout.version,
        "chunks_size": FILES_PER_CHUNK,
        "data_path": layout.data_path,
        "video_path": layout.video_path if videos else None,
    }
    layout.write_metadata(
        folder, WrittenDataset(info=info, tasks=tasks, episodes=episodes, statistics=dataset.statistics, limits_mib=limits)
    )
    if (dataset.root / SUBTASKS).exists():
        shutil.copyfile(dataset.root / SUBTASKS, folder / SUBTASKS)
    encoded = sum(copier.encoded for copier in copiers.values())
    return Conversion(copied=len(episodes) * len(copiers) - encoded, encoded=encoded)


class _TableCopier:
    """Writer of data files from the rows of episodes in others, one row group per episode."""

    def __init__(self, root: Path, layout: Layout, limit_mib: float) -> None:
        self._root, self._layout = root, layout
        self._limit_bytes = limit_mib * 2**20 if layout.shares_files else 0
        self._number = -1
        self._path = root
        self._writer: pq.ParquetWriter | None = None
        self._source: tuple[Path, pa.Table] | None = None  # the file read last

    def append(self, episode: Episode, number: int) -> int:
        """Copy the rows of an episode as episode `number`, and return the number of their file."""
        if self._source is None or self._source[0] != episode.data_file:
            self._source = episode.data_file, pq.read_table(episode.data_file, use_threads=False)
        rows = self._source[1].slice(episode.first_row, episode.length)
        if len(rows) != episode.length:
            raise DataError(
                f"{episode.data_file}: ends before frame {episode.to_index - 1}, which episode {episode.index} lists"
            )
        index = np.arange(episode.from_index, episode.to_index)
        for name, values in {"index": index, "episode_index": np.full(len(rows), number)}.items():
            column = rows.column_names.index(name)
            rows = rows.set_column(column, rows.schema.field(name), pa.array(values).cast(rows.schema.field(name).type))
        if self._writer is None or self._path.stat().st_size >= self._limit_bytes:
            self.close()
            self._number += 1
            self._path = self._root / self._layout.data_path.format(**self._layout.file_names(self._number))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._path, rows.schema)
        self._writer.write_table(rows)
        return self._number

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _stored_statistics(dataset: LeRobotDataset) -> dict[int, Statistics]:
    """Return the statistics of episodes by their index, as far as the dataset stores them."""
    read = v30.read_episode_statistics if dataset.info["codebase_version"] == v30.VERSION else v2.read_episode_statistics
    return read(dataset.root)


def _episode_statistics(dataset: LeRobotDataset, episode: Episode, stored: Statistics) -> Statistics:
    """Return the statistics of an episode: those stored, and those computed from its frames.

    Of images up to 100 evenly spaced frames are read, where LeRobot samples as well.
    """
    stats: dict[str, dict[str, list[Any]]] = {}
    for name, feature in dataset.features.items():
        if name in stored:
            stats[name] = stored[name]
        elif feature["dtype"] in ("video", "image"):
            camera = name.removeprefix(IMAGE_PREFIX)
            frames = np.unique(np.linspace(episode.from_index, episode.to_index - 1, _SAMPLED_IMAGES, dtype=int))
            histogram = sum(
                statistics.pixel_histogram(dataset.image(camera, int(frame)).permute(1, 2, 0).to(torch.uint8).numpy())
                for frame in frames
            )
            stats[name] = statistics.image_statistics(np.asarray(histogram), len(frames))
        elif feature["dtype"] != "string":
            stats[name] = statistics.feature_statistics(dataset.column(name, episode.from_index, episode.to_index))
    return stats
