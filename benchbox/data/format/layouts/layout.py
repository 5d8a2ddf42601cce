"""Files of a dataset that is written, as its layout has them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchbox.data.format.metadata import Statistics

FILES_PER_CHUNK = 1000  # LeRobot's `chunks_size`


@dataclass(frozen=True, slots=True)
class WrittenVideo:
    """Number of the video file of an episode, and the times of the episode in it, in seconds."""

    file: int
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenEpisode:
    """An episode whose frames are written: the numbers of its files, and its statistics by feature."""

    index: int
    tasks: tuple[str, ...]
    from_index: int
    length: int
    data_file: int
    videos: dict[str, WrittenVideo]  # by feature name
    statistics: Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenDataset:
    """All that the metadata of a dataset is written from; `info` is what `meta/info.json` has in every layout."""

    info: dict[str, Any]
    tasks: Sequence[str]  # in the order of their index
    episodes: Sequence[WrittenEpisode]
    statistics: Statistics
    limits_mib: dict[str, float]  # of shared files


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout to write.

    `file_names` maps the number of a file to the fields of the path templates. `write_metadata` writes `meta/`, given the
    folder of the dataset.
    """

    version: str
    data_path: str
    video_path: str
    shares_files: bool  # among episodes, until a file reaches its size limit
    file_names: Callable[[int], dict[str, int]]
    write_metadata: Callable[[Path, WrittenDataset], None]


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file with one value per line, which LeRobot does too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_json_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
