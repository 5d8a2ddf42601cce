"""Inspection of a dataset: its contents and its problems."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.dataset.lerobot import RESPONSE, SUBTASK, LeRobotDataset
from benchbox.data.format.language import DTYPE, PERSISTENT, count_styles
from benchbox.data.format.layouts.v2 import read_episode_statistics
from benchbox.data.format.metadata import ACTION, STATE, count_rows
from benchbox.data.normalisation import REQUIRED_STATISTICS
from benchbox.data.samples.selection import select_frames
from benchbox.data.samples.windows import check_statistics
from benchbox.data.writing.attempts import read_success_rates
from benchbox.errors import DataError
from benchbox.spec.datasets import is_camera

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchbox.data.format.metadata import Episode


@dataclass(frozen=True, slots=True)
class Inspection:
    """Contents (`facts`: label -> text, in order of display) and problems of a dataset, one line each."""

    facts: dict[str, str]
    problems: list[str]


def inspect(dataset: LeRobotDataset, keep: Path | None = None) -> Inspection:
    """Read all states and actions, and the first and last frame of every episode from every camera.

    Args:
        keep: file of ranges of frames, see `benchbox.data.samples.keep`.

    Raises:
        DataError: the keep file is missing or damaged.
        ConfigurationError: it names frames that the dataset does not have.
    """
    lengths = [episode.length for episode in dataset.episodes]
    tasks = Counter(task for episode in dataset.episodes for task in episode.tasks)
    info = dataset.info
    facts = {
        "format": f"LeRobot {info['codebase_version']}, robot {info.get('robot_type') or 'not stated'}",
        "episodes": f"{len(lengths)}, of {min(lengths)} to {max(lengths)} frames" if lengths else "none",
        "frames": f"{len(dataset)} at {dataset.fps:g} frames/s, {len(dataset) / dataset.fps:.1f} s",
        "tasks": "; ".join(f"{task} ({tasks[task]} episodes)" for task in dataset.tasks),
        "size": f"{sum(file.stat().st_size for file in dataset.root.rglob('*') if file.is_file()) / 2**20:.2f} MiB",
    }
    if keep is not None:
        facts["kept"] = f"{keep} {select_frames(dataset.episodes, str(keep)).kept}"
    if dataset.subtasks:
        facts["subtasks"] = "; ".join(dataset.subtasks)
    for name, feature in dataset.features.items():
        shape = " x ".join(map(str, feature["shape"]))
        names = f": {', '.join(map(str, listed))}" if isinstance(listed := feature.get("names"), list | dict) else ""
        is_depth = feature["dtype"] in ("video", "image") and not is_camera(feature)
        facts[name] = f"{feature['dtype']} {shape}{names}{'; a depth map, which policies do not read' if is_depth else ''}"
    if partial := _describe_partial_statistics(dataset):
        facts["stored statistics"] = partial
    for name in (STATE, ACTION):
        stats = dataset.statistics.get(name, {})
        modes = [mode for mode, keys in REQUIRED_STATISTICS.items() if keys and all(key in stats for key in keys)]
        remark = "" if len(modes) == len(REQUIRED_STATISTICS) - 1 else "; training computes what is missing"
        facts[f"statistics of {name}"] = f"{', '.join(stats) or 'none'}; normalises by {', '.join(modes) or 'nothing'}{remark}"
    for name, feature in dataset.features.items():
        if feature["dtype"] == DTYPE:
            facts[name] = _describe_annotations(dataset, name)
    problems = []
    try:
        for rate in read_success_rates(dataset.root):
            facts[f"expert of {rate.env}"] = str(rate)
    except DataError as error:
        problems.append(str(error))
    return Inspection(facts, list(dict.fromkeys([*problems, *_find_problems(dataset)])))


def _describe_partial_statistics(dataset: LeRobotDataset) -> str | None:
    """Return what a file of statistics by episode lacks, None if it lacks none of state and action."""
    stored = read_episode_statistics(dataset.root)
    counts = {name: sum(name in stored.get(episode.index, {}) for episode in dataset.episodes) for name in (STATE, ACTION)}
    partial = [name for name, count in counts.items() if 0 < count < len(dataset.episodes)]
    if not partial:
        return None
    parts = ", ".join(f"{name} of {counts[name]} of {len(dataset.episodes)} episodes" for name in partial)
    return f"meta/episodes_stats.jsonl has statistics of {parts} only, which are not used"


def _describe_annotations(dataset: LeRobotDataset, column: str) -> str:
    """Return the numbers of annotations by style. Persistent ones are the same in all rows of an episode, and count once."""
    counts: Counter[str] = Counter()
    for episode in dataset.episodes:
        path, first_row = dataset.locate(episode)
        rows = range(first_row, first_row + (1 if column == PERSISTENT else episode.length))
        counts += count_styles(path, column, rows)
    return ", ".join(f"{count} {style}" for style, count in sorted(counts.items())) or "none"


def _find_problems(dataset: LeRobotDataset) -> Iterator[str]:
    for name, count in (("total_episodes", len(dataset.episodes)), ("total_tasks", len(dataset.tasks))):
        if (stated := dataset.info.get(name)) != count:
            statement = "is missing" if stated is None else f"is {stated!r:.60}"
            yield f"{dataset.root / 'meta/info.json'}: {name} {statement}, and the dataset has {count}; correct it"
    for feature, mode in product((STATE, ACTION), REQUIRED_STATISTICS):
        try:
            check_statistics(dataset, feature, mode)
        except DataError as error:
            yield str(error)
    frames: Counter[Path] = Counter()  # by data file
    for episode in dataset.episodes:
        start, end = episode.from_index, episode.to_index - 1
        try:
            frames[dataset.locate(episode)[0]] += episode.length
            yield from _find_problems_of_rows(dataset, episode)
            for frame in _first_frames(dataset, episode, "task_index"):
                dataset.task(frame)
            for frame in _first_frames(dataset, episode, SUBTASK) or [start]:
                dataset.text(RESPONSE, frame)
        except DataError as error:
            yield str(error)
            continue
        for camera in dataset.cameras:
            try:
                sizes = {tuple(dataset.image(camera, frame).shape) for frame in (start, end)}
            except DataError as error:
                yield f"episode {episode.index}: {error}"
                continue
            yield from _find_problems_of_sizes(dataset, episode, camera, sizes)
    for path, count in frames.items():
        with suppress(DataError):  # which its episodes have reported
            if (rows := count_rows(path)) > count:
                yield f"{path}: has {rows} rows, and the episodes in it have {count} frames; remove the other rows"


def _first_frames(dataset: LeRobotDataset, episode: Episode, name: str) -> list[int]:
    """Return the first frame of every value of a column in an episode, none if the dataset has no such column."""
    if name not in dataset.features:
        return []
    _, rows = np.unique(dataset.column(name, episode.from_index, episode.to_index)[:, 0], return_index=True)
    return [episode.from_index + int(row) for row in sorted(rows)]


def _find_problems_of_rows(dataset: LeRobotDataset, episode: Episode) -> Iterator[str]:
    """Compare indices, values and times of an episode's rows with what the metadata states."""
    (path, first_row), start, end = dataset.locate(episode), episode.from_index, episode.to_index
    if (index := dataset.column("index", start, end)[0, 0]) != start:
        yield f"{path}: row {first_row} is frame {index}, and episode {episode.index} begins at frame {start}"
    for name, expected in (("episode_index", np.full(end - start, episode.index)), ("frame_index", np.arange(end - start))):
        numbers = dataset.column(name, start, end)[:, 0]
        if (numbers != expected).any():
            frame = int((numbers != expected).argmax())
            yield f"{path}: row {first_row + frame}: {name} is {numbers[frame]}, and {expected[frame]} is expected"
    for name in (STATE, ACTION):
        try:
            dataset.column(name, start, end)
        except DataError as error:
            yield str(error)
    times = dataset.column("timestamp", start, end)[:, 0]
    is_off = ~(np.abs(times - np.arange(len(times)) / dataset.fps) <= 0.5 / dataset.fps)  # of NaN too
    if is_off.any():
        frame = int(is_off.argmax())
        row, at_s, expected_s = first_row + frame, times[frame], frame / dataset.fps
        yield (
            f"{path}: row {row} is at {at_s:g} s of episode {episode.index}, and at {dataset.fps:g} fps, which meta/info.json "
            f"states, frame {frame} is at {expected_s:g} s"
        )


def _find_problems_of_sizes(
    dataset: LeRobotDataset, episode: Episode, camera: str, sizes: set[tuple[int, ...]]
) -> Iterator[str]:
    """Compare the sizes (3, H, W) of images with the shape in the metadata, which has its dimensions in either order."""
    feature = dataset.camera_feature(camera)
    shape = dataset.features[feature]["shape"]
    path = episode.videos[feature].path if feature in episode.videos else dataset.locate(episode)[0]
    for _, height, width in sizes:
        if sorted((height, width)) != sorted(shape)[-2:]:
            yield (
                f"episode {episode.index}: {path}: images of {camera} are {height} x {width}, "
                f"and the shape in meta/info.json is {' x '.join(map(str, shape))}"
            )
