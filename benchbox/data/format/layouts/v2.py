"""LeRobot v2.0 and v2.1: a data file and a video file per episode and camera, and metadata in JSON Lines.

The two differ in where statistics are: v2.0 has those of the dataset in `meta/stats.json`, v2.1 those of every episode in
`meta/episodes_stats.jsonl`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from benchbox.data.format.layouts.fields import checked_statistics, file_path, text, texts, whole_number
from benchbox.data.format.layouts.layout import FILES_PER_CHUNK, Layout, WrittenDataset, write_json, write_json_lines
from benchbox.data.format.metadata import (
    DatasetMetadata,
    Episode,
    Statistics,
    VideoSpan,
    read_json_lines,
    read_statistics,
    read_subtasks,
)
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

V20, V21 = "v2.0", "v2.1"
DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"


def read(root: Path, info: dict[str, Any]) -> DatasetMetadata:
    """Read the metadata of a dataset in one of these layouts.

    Raises:
        DataError: a file is missing or damaged.
    """
    tasks = root / "meta/tasks.jsonl"
    videos = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    episodes: list[Episode] = []
    path = root / "meta/episodes.jsonl"
    rows = [(whole_number(row, "episode_index", str(path)), row) for row in read_json_lines(path)]
    chunks_size = whole_number(info, "chunks_size", str(root / "meta/info.json")) if rows else 1
    if not chunks_size:
        raise DataError(f"{root / 'meta/info.json'}: chunks_size is 0; it is {FILES_PER_CHUNK} in LeRobot")
    for index, row in sorted(rows, key=lambda pair: pair[0]):
        where = f"{path}: episode {index}"
        names = {"episode_chunk": index // chunks_size, "episode_index": index}
        start = episodes[-1].to_index if episodes else 0
        episode = Episode(
            index=index,
            from_index=start,
            to_index=start + whole_number(row, "length", where),
            tasks=texts(row, "tasks", where),
            data_file=file_path(info, "data_path", names, root),
            first_row=0,
            videos={
                video: VideoSpan(file_path(info, "video_path", {"video_key": video} | names, root), from_s=0.0)
                for video in videos
            },
        )
        episodes.append(episode)
    return DatasetMetadata(
        root=root,
        info=info,
        tasks={whole_number(row, "task_index", str(tasks)): text(row, "task", str(tasks)) for row in read_json_lines(tasks)},
        tasks_file=tasks,
        subtasks=read_subtasks(root),
        episodes=tuple(episodes),
        statistics=_read_statistics(root, info["codebase_version"], {episode.index: episode.length for episode in episodes}),
    )


def _read_statistics(root: Path, version: str, lengths: Mapping[int, int]) -> Statistics:
    """Return the stored statistics of the dataset, none if their file is missing or lacks those of an episode.

    Those of an episode that have no count are of all its frames, whose numbers are `lengths`.
    """
    path = root / "meta/stats.json"
    if version == V20:
        return read_statistics(path)
    episodes = [
        {name: {"count": [lengths[index]]} | values for name, values in stats.items()}
        for index, stats in read_episode_statistics(root).items()
        if index in lengths
    ]
    counts = Counter(name for stats in episodes for name in stats)
    complete = [name for name, count in counts.items() if count == len(lengths)]
    return {name: _combine(name, [stats[name] for stats in episodes], root) for name in complete}


def _combine(name: str, parts: Sequence[dict[str, list[Any]]], root: Path) -> dict[str, list[Any]]:
    try:
        return combine_statistics(parts)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{root / 'meta/episodes_stats.jsonl'}: the statistics of {name} cannot be combined ({reason}); "
            "remove the file, and training computes those that it needs"
        ) from None


def read_episode_statistics(root: Path) -> dict[int, Statistics]:
    """Return the statistics of every episode by its index, none if v2.1 does not store any; v2.0 never does.

    Raises:
        DataError: the file is damaged.
    """
    path = root / "meta/episodes_stats.jsonl"
    rows = read_json_lines(path) if path.exists() else []
    episodes = {}
    for row in rows:
        index = whole_number(row, "episode_index", str(path))
        episodes[index] = checked_statistics(row.get("stats"), f"{path}: episode {index}")
    return episodes


def combine_statistics(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Return the statistics of all frames of a feature from those of parts of them: statistic -> values.

    Means and variances are weighted by the parts' frames (Chan, Golub, LeVeque 1979); quantiles cannot be combined.
    """
    columns = {
        name: np.array([part[name] for part in parts], dtype=np.float64) for name in ("min", "max", "mean", "std", "count")
    }
    counts = columns["count"].reshape(len(parts), *[1] * (columns["mean"].ndim - 1))
    total = counts.sum()
    mean = (counts * columns["mean"]).sum(0) / total
    variance = (counts * (columns["std"] ** 2 + (columns["mean"] - mean) ** 2)).sum(0) / total
    combined = {"min": columns["min"].min(0), "max": columns["max"].max(0), "mean": mean, "std": np.sqrt(variance)}
    return {name: values.tolist() for name, values in combined.items()} | {"count": [int(total)]}


def file_names(episode: int) -> dict[str, int]:
    """Return the chunk of an episode, and the episode: every episode has files of its own."""
    return {"episode_chunk": episode // FILES_PER_CHUNK, "episode_index": episode}


def write_metadata(root: Path, dataset: WrittenDataset) -> None:
    """Write `meta/` of v2.1."""
    meta = root / "meta"
    write_json_lines(
        meta / "episodes.jsonl",
        [{"episode_index": row.index, "tasks": list(row.tasks), "length": row.length} for row in dataset.episodes],
    )
    write_json_lines(meta / "tasks.jsonl", [{"task_index": index, "task": task} for index, task in enumerate(dataset.tasks)])
    write_json_lines(
        meta / "episodes_stats.jsonl",
        [{"episode_index": episode.index, "stats": episode.statistics} for episode in dataset.episodes],
    )
    counts = {
        "total_videos": sum(len(episode.videos) for episode in dataset.episodes),
        "total_chunks": -(-len(dataset.episodes) // FILES_PER_CHUNK),
    }
    write_json(meta / "info.json", dataset.info | counts)


LAYOUT = Layout(
    version=V21,
    data_path=DATA,
    video_path=VIDEO,
    shares_files=False,
    file_names=file_names,
    write_metadata=write_metadata,
)
