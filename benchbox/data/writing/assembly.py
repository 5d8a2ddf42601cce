"""A dataset from parts of one episode each: rows get their indices, videos are copied, statistics are those of all frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchbox.data.dataset.lerobot import LeRobotDataset, open_dataset
from benchbox.data.format import statistics
from benchbox.data.format.layouts import v30
from benchbox.data.format.layouts.layout import WrittenDataset, WrittenEpisode
from benchbox.data.format.metadata import read_table
from benchbox.data.video.remux import VideoCopier
from benchbox.data.writing.features import DEFAULT_FEATURES
from benchbox.data.writing.files import TableFiles
from benchbox.data.writing.writer import DATA_FILE_MIB, LIMITS_MIB, VIDEO_FILE_MIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Part:
    """A dataset of one episode and one task, and the histogram (3, 256) of the pixels of each of its cameras, by feature."""

    root: Path
    histograms: Mapping[str, np.ndarray]


def assemble(parts: Sequence[Part], folder: Path) -> None:
    """Write parts with the same features, in their order, as the episodes of a v3.0 dataset into a folder without one.

    Raises:
        DataError: a part is damaged.
    """
    layout = v30.LAYOUT
    first = open_dataset(parts[0].root)
    cameras = [name for name, feature in first.features.items() if feature["dtype"] == "video"]
    tables = TableFiles(folder, layout, DATA_FILE_MIB)
    copiers = {name: VideoCopier(folder, name, fps=first.fps, layout=layout, limit_mib=VIDEO_FILE_MIB) for name in cameras}
    columns: dict[str, list[np.ndarray]] = {name: [] for name in first.features if name not in cameras}
    tasks: dict[str, int] = {}
    episodes: list[WrittenEpisode] = []
    start = 0
    for number, part in enumerate(parts):
        dataset = open_dataset(part.root)
        (episode,) = dataset.episodes
        indices = {
            "index": np.arange(start, start + episode.length),
            "episode_index": np.full(episode.length, number),
            "task_index": np.full(episode.length, tasks.setdefault(dataset.tasks[0], len(tasks))),
        }
        values = {name: _values(dataset, name, indices) for name in columns}
        for name, rows in values.items():
            columns[name].append(rows)
        images = {name: dataset.statistics[name] for name in cameras}
        written = WrittenEpisode(
            index=number,
            tasks=episode.tasks,
            from_index=start,
            length=episode.length,
            data_file=tables.append(_with_indices(read_table(episode.data_file), indices)),
            videos={name: copier.append(episode.videos[name], episode.length) for name, copier in copiers.items()},
            statistics={name: statistics.feature_statistics(rows) for name, rows in values.items()} | images,
        )
        episodes.append(written)
        start += episode.length
    tables.close()
    for copier in copiers.values():
        copier.close()
    stats = {name: statistics.feature_statistics(np.concatenate(rows)) for name, rows in columns.items()}
    for name in cameras:
        histogram = np.sum([part.histograms[name] for part in parts], axis=0)
        stats[name] = statistics.image_statistics(histogram, start)
    totals = {
        "total_episodes": len(episodes),
        "total_frames": start,
        "total_tasks": len(tasks),
        "splits": {"train": f"0:{len(episodes)}"},
    }
    layout.write_metadata(
        folder,
        WrittenDataset(info=first.info | totals, tasks=list(tasks), episodes=episodes, statistics=stats, limits_mib=LIMITS_MIB),
    )


def _values(dataset: LeRobotDataset, name: str, indices: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the values (frames, D) of a column in the new dataset."""
    return indices[name][:, None] if name in indices else dataset.column(name, 0, len(dataset))


def _with_indices(rows: pa.Table, indices: Mapping[str, Any]) -> pa.Table:
    for name, values in indices.items():
        assert name in DEFAULT_FEATURES
        column = rows.column_names.index(name)
        rows = rows.set_column(column, rows.schema.field(name), pa.array(values))
    return rows
