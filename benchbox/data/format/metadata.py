"""Metadata of LeRobot datasets, the same for every layout (`benchbox.data.format.layouts`), and readers of its files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchbox.errors import DataError, reason_of

if TYPE_CHECKING:
    from pathlib import Path

STATE = "observation.state"
ACTION = "action"
IMAGE_PREFIX = "observation.images."
SUBTASKS = "meta/subtasks.parquet"

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
    data_file: Path  # as listed; `TableCache.locate` finds the rows where this is wrong
    first_row: int  # of the episode in its data file
    videos: dict[str, VideoSpan]  # by feature name

    @property
    def length(self) -> int:
        return self.to_index - self.from_index


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetMetadata:
    """Contents of the `meta` folder.

    `tasks` by task index; `subtasks` by subtask index, empty if the dataset has none; `statistics` feature -> statistic ->
    values; `episodes` in order, without gaps; `shares_files`: whether a data file has several episodes.
    """

    root: Path
    info: dict[str, Any]
    tasks: dict[int, str]
    tasks_file: Path
    subtasks: dict[int, str]
    episodes: tuple[Episode, ...]
    statistics: Statistics
    shares_files: bool = False

    @property
    def fps(self) -> float:
        return float(self.info["fps"])

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        features: dict[str, dict[str, Any]] = self.info["features"]
        return features


def find_data_files(root: Path) -> list[Path]:
    """Return the data files of a dataset in the order of their frames, as lerobot reads them, listed in `meta` or not."""
    return sorted(root.glob("data/*/*.parquet"))


def read_json_object(path: Path, missing: str) -> dict[str, Any]:
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


def read_statistics(path: Path) -> Statistics:
    """Read the statistics of a dataset, none if there is no such file.

    Raises:
        DataError: the file is damaged.
    """
    statistics = read_json_object(path, missing="") if path.exists() else {}
    for name, values in statistics.items():
        if not isinstance(values, dict):
            raise DataError(f"{path}, {name}: holds {values!s:.60}, and statistics by name are expected; recompute it")
    return statistics


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read columns of a Parquet file, or all of it.

    Raises:
        DataError: the file is missing or damaged, lacks a column, or has one twice.
    """
    file = _open_table(path)
    try:
        table = file.read(columns=columns, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not readable as Parquet ({reason_of(error)}); restore the file") from None
    missing = [column for column in columns or () if column not in table.column_names]
    if missing:
        raise DataError(f"{path}: no column {missing[0]!r}")
    for column, count in Counter(table.column_names).items():
        if count > 1:
            raise DataError(f"{path}: {count} columns are named {column!r}; keep one of them")
    return table


def read_schema(path: Path) -> pa.Schema:
    """Read the columns of a Parquet file and their types.

    Raises:
        DataError: the file is missing or damaged.
    """
    return _open_table(path).schema_arrow


def count_rows(path: Path) -> int:
    """Return the number of rows of a Parquet file.

    Raises:
        DataError: the file is missing or damaged.
    """
    return int(_open_table(path).metadata.num_rows)


def _open_table(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise DataError(f"{path}: the file is missing; restore it") from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not readable as Parquet ({reason_of(error)}); restore the file") from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line; empty lines are skipped.

    Raises:
        DataError: the file is missing, unreadable, or a line is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # texts may hold the other line breaks of `splitlines`
    except FileNotFoundError:
        raise DataError(f"{path}: the file is missing") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable as text ({error})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not readable as JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: expected a JSON object")
        rows.append(row)
    return rows


def read_subtasks(root: Path) -> dict[int, str]:
    """Return the texts of subtasks by their index, as LeRobot 0.4.4 to 0.5 stores them; none where there is no table."""
    path = root / SUBTASKS
    return read_texts(path, "subtask_index") if path.is_file() else {}


def read_texts(path: Path, index: str) -> dict[int, str]:
    """Read a table of texts by the values of its column `index`.

    Raises:
        DataError: the file is missing or damaged.
    """
    # The texts are in the index of the data frame, whose name differs between versions of LeRobot.
    text_column = next((column for column in read_schema(path).names if column != index), None)
    if text_column is None:
        raise DataError(f"{path}: no column of texts; restore the file")
    table = read_table(path, [index, text_column])
    numbers, names = table.column(index), table.column(text_column)
    if not pa.types.is_integer(numbers.type) or numbers.null_count:
        raise DataError(f"{path}: column {index!r} holds {numbers.type}, and a whole number in every row is expected")
    if not (pa.types.is_string(names.type) or pa.types.is_large_string(names.type)) or names.null_count:
        raise DataError(f"{path}: column {text_column!r} holds {names.type}, and a text in every row is expected")
    return dict(zip(numbers.to_pylist(), names.to_pylist(), strict=True))
