"""LeRobot v3.0: many episodes in a data file and in a video file, and tables of episodes, tasks and subtasks in Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchbox.data.format.layouts.fields import checked_statistics, file_path, seconds, texts, whole_number
from benchbox.data.format.layouts.layout import FILES_PER_CHUNK, Layout, WrittenDataset, write_json
from benchbox.data.format.metadata import (
    DatasetMetadata,
    Episode,
    Statistics,
    VideoSpan,
    read_schema,
    read_statistics,
    read_subtasks,
    read_table,
    read_texts,
)
from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "v3.0"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"


def read(root: Path, info: dict[str, Any]) -> DatasetMetadata:
    """Read the metadata of a dataset in this layout.

    Raises:
        DataError: a file is missing or damaged.
    """
    tasks = root / "meta/tasks.parquet"
    videos = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]

    columns = ["episode_index", "tasks", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index"]
    for video in videos:
        columns += [f"videos/{video}/{key}" for key in ("chunk_index", "file_index", "from_timestamp")]
    files = sorted((root / "meta/episodes").glob("chunk-*/file-*.parquet"))
    if not files:
        raise DataError(f"{root / 'meta/episodes'}: the episode tables are missing")
    rows = [
        (f"{file}: row {number}", row) for file in files for number, row in enumerate(read_table(file, columns).to_pylist())
    ]
    rows.sort(key=lambda pair: whole_number(pair[1], "dataset_from_index", pair[0]))

    def file_of(row: dict[str, Any], where: str, prefix: str) -> dict[str, int]:
        return {name: whole_number(row, f"{prefix}/{name}", where) for name in ("chunk_index", "file_index")}

    def video_span(row: dict[str, Any], where: str, video: str) -> VideoSpan:
        names = {"video_key": video, **file_of(row, where, f"videos/{video}")}
        return VideoSpan(file_path(info, "video_path", names, root), seconds(row, f"videos/{video}/from_timestamp", where))

    episodes = []
    first_indices: dict[Path, int] = {}  # of the first frame in a data file
    for where, row in rows:
        path = file_path(info, "data_path", file_of(row, where, "data"), root)
        start = row["dataset_from_index"]
        episode = Episode(
            index=whole_number(row, "episode_index", where),
            from_index=start,
            to_index=whole_number(row, "dataset_to_index", where),
            tasks=texts(row, "tasks", where),
            data_file=path,
            first_row=start - first_indices.setdefault(path, start),
            videos={video: video_span(row, where, video) for video in videos},
        )
        episodes.append(episode)
    return DatasetMetadata(
        root=root,
        info=info,
        tasks=read_texts(tasks, "task_index"),
        tasks_file=tasks,
        subtasks=read_subtasks(root),
        episodes=tuple(episodes),
        statistics=read_statistics(root / "meta/stats.json"),
        shares_files=True,
    )


def read_episode_statistics(root: Path) -> dict[int, Statistics]:
    """Return the statistics of every episode by its index, none if the episode tables have none.

    Raises:
        DataError: a table is damaged.
    """
    episodes: dict[int, Statistics] = {}
    for file in sorted((root / "meta/episodes").glob("chunk-*/file-*.parquet")):
        columns = [name for name in read_schema(file).names if name.startswith("stats/") and name.count("/") > 1]
        for number, row in enumerate(read_table(file, ["episode_index", *columns]).to_pylist()):
            where = f"{file}: row {number}"
            stats: Statistics = {}
            for column in columns:
                _, *feature, statistic = column.split("/")
                if row[column] is not None:
                    stats.setdefault("/".join(feature), {})[statistic] = row[column]
            episodes[whole_number(row, "episode_index", where)] = checked_statistics(stats, where)
    return episodes


def file_names(number: int) -> dict[str, int]:
    """Return the chunk of a file, and its index in it."""
    chunk, index = divmod(number, FILES_PER_CHUNK)
    return {"chunk_index": chunk, "file_index": index}


def write_metadata(root: Path, dataset: WrittenDataset) -> None:
    """Write `meta/`."""
    rows = []
    for episode in dataset.episodes:
        row: dict[str, Any] = {
            "episode_index": episode.index,
            "tasks": list(episode.tasks),
            "length": episode.length,
            "dataset_from_index": episode.from_index,
            "dataset_to_index": episode.from_index + episode.length,
            **{f"data/{key}": value for key, value in file_names(episode.data_file).items()},
        }
        for name, video in episode.videos.items():
            span = {**file_names(video.file), "from_timestamp": video.from_s, "to_timestamp": video.to_s}
            row |= {f"videos/{name}/{key}": value for key, value in span.items()}
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        row |= {f"stats/{name}/{key}": value for name, stats in episode.statistics.items() for key, value in stats.items()}
        rows.append(row)
    episodes = root / EPISODES.format(**file_names(0))
    episodes.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), episodes)
    import pandas as pd  # imported here because every rank imports this package and few write a dataset

    tasks = pd.DataFrame({"task_index": range(len(dataset.tasks))}, index=pd.Index(list(dataset.tasks), name="task"))
    tasks.to_parquet(root / "meta/tasks.parquet")
    write_json(root / "meta/stats.json", dataset.statistics)
    write_json(root / "meta/info.json", dataset.info | dataset.limits_mib)


LAYOUT = Layout(
    version=VERSION,
    data_path=DATA,
    video_path=VIDEO,
    shares_files=True,
    file_names=file_names,
    write_metadata=write_metadata,
)
