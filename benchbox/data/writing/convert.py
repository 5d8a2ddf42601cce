"""Conversion of LeRobot datasets between layouts. Tables keep their values, and videos are copied where they can be."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from benchbox.data.dataset.lerobot import LeRobotDataset, open_training_dataset
from benchbox.data.format import statistics
from benchbox.data.format.language import DTYPE
from benchbox.data.format.layouts import v2, v30
from benchbox.data.format.layouts.layout import FILES_PER_CHUNK, WrittenDataset, WrittenEpisode
from benchbox.data.format.metadata import IMAGE_PREFIX, SUBTASKS, read_table
from benchbox.data.video.remux import VideoCopier
from benchbox.data.writing.attempts import FILE as RECORDING
from benchbox.data.writing.files import TableFiles
from benchbox.data.writing.writer import DATA_FILE_MIB, LAYOUTS, LIMITS_MIB, VIDEO_FILE_MIB
from benchbox.errors import DataError, reason_of
from benchbox.spec.datasets import is_camera

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchbox.data.format.layouts.layout import Layout
    from benchbox.data.format.metadata import Episode, Statistics

_COMBINED = {"min", "max", "mean", "std", "count"}  # statistics of episodes that readers of v2.1 combine
_SAMPLED_IMAGES = 100  # of an episode and camera whose statistics are not stored
_LAYOUT_KEYS = ("total_chunks", "total_videos", "data_files_size_in_mb", "video_files_size_in_mb", "data_path", "video_path")


@dataclass(frozen=True, slots=True)
class Conversion:
    """Result of a conversion: videos of episodes that were copied, and those that had to be encoded again.

    `left_out` are the features that the new layout does not have.
    """

    copied: int
    encoded: int
    left_out: tuple[str, ...] = ()


def convert(
    source: Path, target: Path, version: str, on_progress: Callable[[int, int], None] = lambda _, __: None
) -> Conversion:
    """Write a dataset in another layout: v3.0 or v2.1. `on_progress` is called with the number of episodes done, and of all.

    The dataset appears as `target` when it is complete. Nothing is written into `source`. LeRobot's readers of v2.1 know no
    columns of annotations, which are left out there.

    Raises:
        DataError: `target` exists, `source` is damaged, or has that layout already.
    """
    if target.exists():
        raise DataError(f"{target}: exists already; name another folder or remove it")
    dataset, _ = open_training_dataset(source, cache=False)
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
    left_out = [name for name, feature in dataset.features.items() if feature["dtype"] == DTYPE and layout.version == v2.V21]
    rows, tables = _EpisodeRows(dataset, left_out, layout), TableFiles(folder, layout, DATA_FILE_MIB)
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
            data_file=tables.append(rows.read(episode, number)),
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
        "total_episodes": len(episodes),
        "total_tasks": len(tasks),
        "chunks_size": FILES_PER_CHUNK,
        "data_path": layout.data_path,
        "video_path": layout.video_path if videos else None,
        "features": {name: feature for name, feature in dataset.features.items() if name not in left_out},
    }
    written_dataset = WrittenDataset(
        info=info, tasks=tasks, episodes=episodes, statistics=dataset.statistics, limits_mib=LIMITS_MIB
    )
    try:
        layout.write_metadata(folder, written_dataset)
    except pa.ArrowException as error:
        raise DataError(
            f"{dataset.root / 'meta'}: the statistics of its episodes have different shapes ({reason_of(error)}); "
            "remove them from the dataset, and the conversion computes them"
        ) from None
    for name in (SUBTASKS, RECORDING):
        if (dataset.root / name).exists():
            shutil.copyfile(dataset.root / name, folder / name)
    encoded = sum(copier.encoded for copier in copiers.values())
    return Conversion(copied=len(episodes) * len(copiers) - encoded, encoded=encoded, left_out=tuple(left_out))


class _EpisodeRows:
    """Rows of episodes, with the indices that they have in the new dataset. The data file read last is kept."""

    def __init__(self, dataset: LeRobotDataset, left_out: Sequence[str], layout: Layout) -> None:
        self._dataset = dataset
        self._left_out = left_out
        self._layout = layout
        self._images = [name for name, feature in dataset.features.items() if feature["dtype"] == "image"]
        self._source: tuple[Path, pa.Table] | None = None
        self._schema: pa.Schema | None = None  # of all episodes

    def read(self, episode: Episode, number: int) -> pa.Table:
        """Return the rows of an episode as those of episode `number`.

        Raises:
            DataError: the file is missing or damaged, or ends before the episode does.
        """
        path, first_row = self._dataset.locate(episode)
        if self._source is None or self._source[0] != path:
            table = read_table(path)
            self._source = path, table.select([name for name in table.column_names if name not in self._left_out])
        rows = self._source[1].slice(first_row, episode.length)
        if len(rows) != episode.length:
            raise DataError(f"{path}: ends before frame {episode.to_index - 1}, which episode {episode.index} lists")
        index = np.arange(episode.from_index, episode.to_index)
        for name, values in {"index": index, "episode_index": np.full(len(rows), number)}.items():
            rows = _replace(rows, name, pa.array(values), path)
        if "frame_index" in rows.column_names and not pa.types.is_integer(rows.schema.field("frame_index").type):
            raise DataError(f"{path}: column 'frame_index' holds {rows.schema.field('frame_index').type}, not whole numbers")
        for name in self._images:
            rows = _replace(rows, name, self._embed(rows, name, path), path)
        if self._schema is None:
            self._schema = _v21_schema(rows.schema, self._images) if self._layout.version == v2.V21 else rows.schema
        try:
            return rows.select(self._schema.names).cast(self._schema)
        except (KeyError, ValueError, pa.ArrowException) as error:
            raise DataError(
                f"{path}: its columns are not those of the files before it ({reason_of(error)}); restore the file"
            ) from None

    def _embed(self, rows: pa.Table, name: str, path: Path) -> pa.Array:
        """Return images with their bytes: files that the rows name would not be in the new dataset."""
        if name not in rows.column_names:
            raise DataError(f"{path}: no column {name!r}; restore the file")
        cells = rows.column(name).to_pylist()
        for row, cell in enumerate(cells):
            if not isinstance(cell, dict):
                raise DataError(f"{path}: row {row}, {name}: not an image; an object with bytes or a path is expected")
            if cell.get("bytes") is None:
                try:
                    cell["bytes"] = (self._dataset.root / str(cell.get("path"))).read_bytes()
                except OSError as error:
                    raise DataError(f"{path}: row {row} names an image that cannot be read ({error})") from None
        return pa.array(cells, rows.schema.field(name).type)


def _v21_schema(schema: pa.Schema, images: Sequence[str]) -> pa.Schema:
    """Return a schema whose metadata say which columns are images, and nothing of others.

    LeRobot reads v2.1 with versions of `datasets` that cannot read what later ones write of lists, and find images only so.
    """
    features = {name: {"_type": "Image"} for name in images}
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})} if images else None)


def _replace(rows: pa.Table, name: str, values: pa.Array, path: Path) -> pa.Table:
    if name not in rows.column_names:
        raise DataError(f"{path}: no column {name!r}; restore the file")
    return rows.set_column(rows.column_names.index(name), name, values)


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
        if stored.get(name, {}).keys() >= _COMBINED:
            stats[name] = stored[name]
        elif is_camera(feature):
            camera = name.removeprefix(IMAGE_PREFIX)
            frames = np.unique(np.linspace(episode.from_index, episode.to_index - 1, _SAMPLED_IMAGES, dtype=int))
            histogram = sum(
                statistics.pixel_histogram(dataset.image(camera, int(frame)).permute(1, 2, 0).to(torch.uint8).numpy())
                for frame in frames
            )
            stats[name] = statistics.image_statistics(np.asarray(histogram), len(frames))
        elif feature["dtype"] not in ("string", "video", "image", DTYPE):
            values = dataset.column(name, episode.from_index, episode.to_index)
            stats[name] = statistics.feature_statistics(values.reshape(len(values), *feature["shape"] or [1]))
    return stats
