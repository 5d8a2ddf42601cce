"""Metadata of LeRobot datasets. Each supported version has a reader, and all of them return `DatasetMetadata`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

STATE = "observation.state"
ACTION = "action"
IMAGE_PREFIX = "observation.images."

V30 = "v3.0"
V30_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
V30_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
V30_EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"

Statistics = dict[str, dict[str, list[Any]]]


@dataclass(frozen=True, slots=True)
class VideoSpan:
    """Video file of an episode, and the time of its first frame in that file in seconds."""

    path: Path
    from_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Rows `from_index` up to `to_index` (exclusive) of the dataset, and the files that contain them."""

    index: int
    from_index: int
    to_index: int
    tasks: tuple[str, ...]
    data_file: Path
    videos: dict[str, VideoSpan]  # by feature name

    @property
    def length(self) -> int:
        return self.to_index - self.from_index


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetMetadata:
    """Contents of the `meta` folder.

    `tasks` by task index; `subtasks` by subtask index, empty if the dataset has none; `statistics` feature -> statistic ->
    values; `episodes` in order, without gaps.
    """

    root: Path
    info: dict[str, Any]
    fps: float
    features: dict[str, dict[str, Any]]
    tasks: dict[int, str]
    subtasks: dict[int, str]
    episodes: tuple[Episode, ...]
    statistics: Statistics


def read_metadata(root: Path) -> DatasetMetadata:
    """Read all files in `meta/`. No data or video file is opened.

    Raises:
        DataError: it is not a LeRobot dataset, has an unsupported version, or a file is damaged.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such dataset folder")
    info = _read_json_object(root / "meta/info.json", missing="not a LeRobot dataset: meta/info.json is missing")
    version = info.get("codebase_version")
    if version not in _READERS:
        raise DataError(
            f"{root / 'meta/info.json'}: codebase_version is {version!r}, and {', '.join(_READERS)} can be read; "
            "convert the dataset with lerobot's own conversion script"
        )
    try:
        metadata = _READERS[version](root, info)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{root / 'meta'}: damaged metadata ({type(error).__name__}: {error})") from error
    expected = 0
    for episode in metadata.episodes:
        if episode.from_index != expected or episode.length < 1:
            raise DataError(f"{root / 'meta/episodes'}: episode {episode.index} does not follow the one before it")
        expected = episode.to_index
    if info.get("total_frames") != expected:
        raise DataError(
            f"{root / 'meta/info.json'}: total_frames is {info.get('total_frames')}, and the episodes hold {expected}"
        )
    return metadata


def _read_json_object(path: Path, missing: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: the file is missing (with the message `missing`), unreadable, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path.parents[1]}: {missing}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object")
    return value


def read_table(path: Path, columns: list[str]) -> pa.Table:
    """Read columns of a Parquet file.

    Raises:
        DataError: the file is missing or damaged, or lacks a column.
    """
    try:
        table = pq.ParquetFile(path).read(columns=columns, use_threads=False)
    except FileNotFoundError:
        raise DataError(f"{path}: the file is missing") from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not readable as Parquet ({str(error).splitlines()[0]})") from None
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise DataError(f"{path}: no column {missing[0]!r}")
    return table


def _read_v30(root: Path, info: dict[str, Any]) -> DatasetMetadata:
    features: dict[str, dict[str, Any]] = info["features"]
    videos = [name for name, feature in features.items() if feature["dtype"] == "video"]
    subtasks = root / "meta/subtasks.parquet"  # written by LeRobot 0.4.4 to 0.5

    columns = ["episode_index", "tasks", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index"]
    for video in videos:
        columns += [f"videos/{video}/{key}" for key in ("chunk_index", "file_index", "from_timestamp")]
    files = sorted((root / "meta/episodes").glob("chunk-*/file-*.parquet"))
    if not files:
        raise DataError(f"{root / 'meta/episodes'}: the episode tables are missing")
    rows = [row for file in files for row in read_table(file, columns).to_pylist()]

    def video_span(row: dict[str, Any], video: str) -> VideoSpan:
        path = info["video_path"].format(
            video_key=video, chunk_index=row[f"videos/{video}/chunk_index"], file_index=row[f"videos/{video}/file_index"]
        )
        return VideoSpan(root / path, row[f"videos/{video}/from_timestamp"])

    episodes = [
        Episode(
            index=row["episode_index"],
            from_index=row["dataset_from_index"],
            to_index=row["dataset_to_index"],
            tasks=tuple(row["tasks"]),
            data_file=root / info["data_path"].format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]),
            videos={video: video_span(row, video) for video in videos},
        )
        for row in sorted(rows, key=lambda row: row["dataset_from_index"])
    ]
    return DatasetMetadata(
        root=root,
        info=info,
        fps=float(info["fps"]),
        features=features,
        tasks=_read_texts(root / "meta/tasks.parquet", "task_index"),
        subtasks=_read_texts(subtasks, "subtask_index") if subtasks.is_file() else {},
        episodes=tuple(episodes),
        statistics=_read_json_object(root / "meta/stats.json", missing="meta/stats.json is missing; recompute the statistics"),
    )


def _read_texts(path: Path, index: str) -> dict[int, str]:
    """Read a table of texts by the values of its column `index`."""
    indices = read_table(path, [index]).column(index).to_pylist()
    # The texts are in the index of the data frame, whose name differs between versions of LeRobot.
    text_column = next(column for column in pq.read_schema(path).names if column != index)
    return dict(zip(indices, read_table(path, [text_column]).column(text_column).to_pylist(), strict=True))


_READERS = {V30: _read_v30}
