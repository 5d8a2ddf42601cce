"""Columns of the data files of a dataset, read on demand."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import pyarrow as pa

from benchbox.data.format.metadata import ACTION, STATE, find_data_files, read_table
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchbox.data.format.metadata import DatasetMetadata, Episode

# Of all datasets of a process, each with an equal part. Frames that are shuffled over a dataset come from any of its files, and
# the numbers of a million frames are some 200 MB: a count of files would read most of the small ones again for every sample.
MAX_CACHED_BYTES = 256 * 2**20
_TEXT_BYTES = 64  # of a text in memory, beside its letters
INDICES = ("index", "episode_index", "frame_index", "task_index", "subtask_index")


@dataclass(slots=True)
class _Table:
    """Columns of a data file that were read and their bytes, the index of its first frame, and the number of its rows."""

    columns: dict[str, np.ndarray]
    first_frame: int
    length: int
    size_bytes: int = 0

    def add(self, columns: Mapping[str, np.ndarray]) -> int:
        """Add columns, and return their bytes."""
        added = sum(map(_size_bytes, columns.values()))
        self.columns |= columns
        self.size_bytes += added
        return added


_CACHES: WeakSet[TableCache] = WeakSet()  # of the process


class TableCache:
    """Columns of the most recently used data files of a dataset, read on first use, up to its part of `MAX_CACHED_BYTES`.

    Columns that were used of one file are read of the next one together, which opens it once.
    """

    def __init__(self, metadata: DatasetMetadata) -> None:
        self._metadata = metadata
        self._used: dict[str, None] = {}  # names of columns
        self._size_bytes = 0
        self._tables: OrderedDict[Path, _Table] = OrderedDict()
        self._last: tuple[Path | None, _Table] = (None, _Table({}, 0, 0))
        _CACHES.add(self)
        self._relocated: dict[int, tuple[Path, int]] = {}  # by the first frame of episodes that are not where they are listed

    def rows(self, episode: Episode, name: str, start: int, stop: int) -> np.ndarray:
        """Return the values (rows, D) of a column for frames `start` up to `stop` (exclusive) of an episode.

        There are fewer if the file ends earlier. State and action are float32.

        Raises:
            DataError: the file is missing or damaged, or its values do not have the shape of the feature.
        """
        path, first_row = self.locate(episode)
        column = self._column(path, name)
        shift = first_row - episode.from_index
        return column[start + shift : stop + shift]

    def locate(self, episode: Episode) -> tuple[Path, int]:
        """Return the data file of an episode, and the number of its first row there.

        `convert_dataset_v21_to_v30` of lerobot 0.4 lists the first episode of every further file under the file before it.
        lerobot reads rows by their position in all files; here the column `index` says which file has the episode. Where it
        says of none, rows are those that are listed, if they are of the episode.

        Raises:
            DataError: no data file has the episode, or a file is missing or damaged.
        """
        if not self._metadata.shares_files:
            return episode.data_file, episode.first_row
        if (found := self._relocated.get(episode.from_index)) is not None:
            return found
        path, row = episode.data_file, episode.first_row
        if path is self._last[0] or path in self._tables or path.is_file():
            table = self._open(path)
            if row < table.length and table.first_frame + row == episode.from_index:
                return path, row
        self._relocated[episode.from_index] = self._search(episode)
        return self._relocated[episode.from_index]

    def _search(self, episode: Episode) -> tuple[Path, int]:
        """Find an episode in its file by the column `index`, or in another file, of which a few are opened."""
        path = episode.data_file
        if path.is_file() and (row := self._row_of(path, episode)) is not None:
            return path, row
        files = find_data_files(self._metadata.root)
        number = bisect_right(files, episode.from_index, key=lambda path: self._open(path).first_frame) - 1
        if number >= 0 and (row := self._row_of(files[number], episode)) is not None:
            return files[number], row
        table, row = self._open(path), episode.first_row
        if row + episode.length <= table.length and self._column(path, "episode_index")[row, 0] == episode.index:
            return path, row  # which `data inspect` reports
        content = f"row {row} is frame {table.first_frame + row}" if row < table.length else f"it has {table.length} rows"
        raise DataError(
            f"{path}: {content}, and meta/episodes lists episode {episode.index} from row {row} and frame {episode.from_index} "
            "on, which no data file has; restore the data files, or convert the dataset anew"
        )

    def _row_of(self, path: Path, episode: Episode) -> int | None:
        """Return the row with the first frame of an episode, None if a file has no such row."""
        table = self._open(path)
        row = episode.from_index - table.first_frame
        if not 0 <= row < table.length or self._column(path, "episode_index")[row, 0] != episode.index:
            return None
        return row

    def _column(self, path: Path, name: str) -> np.ndarray:
        columns = self._open(path).columns
        if name not in columns:
            self._used[name] = None
            self._read(path, [used for used in self._used if used not in columns])
        return columns[name]

    def _read(self, path: Path, names: Sequence[str]) -> None:
        """Read columns of a file that is open, and forget others for them: those of the files that were used longest ago."""
        self._size_bytes += self._tables[path].add(read_columns(path, {name: self._metadata.features[name] for name in names}))
        while self._size_bytes > MAX_CACHED_BYTES // len(_CACHES) and len(self._tables) > 1:
            self._size_bytes -= self._tables.popitem(last=False)[1].size_bytes

    def _open(self, path: Path) -> _Table:
        if path is self._last[0]:  # comparing paths takes longer than reading a row
            return self._last[1]
        if path not in self._tables:
            index = read_column(path, "index", self._metadata.features["index"])
            gaps = np.flatnonzero(np.diff(index[:, 0]) != 1)
            if len(gaps) or not len(index):
                where = f"row {gaps[0] + 1} does not follow the one before it" if len(gaps) else "it has no rows"
                raise DataError(f"{path}: its rows are not consecutive frames: {where}")
            self._tables[path] = _Table({}, int(index[0, 0]), len(index))
            self._size_bytes += self._tables[path].add({"index": index})
        self._tables.move_to_end(path)
        self._last = path, self._tables[path]
        return self._last[1]


def read_column(path: Path, name: str, feature: Mapping[str, Any]) -> np.ndarray:
    """Read a column of a data file: the values (rows, D) of a feature, float32 those of state and action.

    Raises:
        DataError: the file is missing or damaged, or its values are missing or do not have the shape of the feature.
    """
    return read_columns(path, {name: feature})[name]


def read_columns(path: Path, features: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Read the columns of these features, by name, as `read_column` does.

    Raises:
        DataError: see `read_column`.
    """
    table = read_table(path, list(features))
    return {name: _values(path, name, feature, table.column(name).combine_chunks()) for name, feature in features.items()}


def _values(path: Path, name: str, feature: Mapping[str, Any], column: pa.Array) -> np.ndarray:
    is_text = feature["dtype"] == "string"
    if is_text:
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_null(column.type)):
            raise DataError(f"{path}: column {name!r} holds {column.type} with other values than texts, which are expected")
    elif column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(f"{path}: column {name!r} has no value in row {row}")
    flat = column
    while pa.types.is_list(flat.type) or pa.types.is_large_list(flat.type) or pa.types.is_fixed_size_list(flat.type):
        flat = flat.flatten()  # of one dimension
    values = np.array([text or "" for text in column.to_pylist()], dtype=object) if is_text else _to_numpy(flat)
    if values.size != len(column) * int(np.prod(feature["shape"])):
        raise DataError(f"{path}: the values of {name!r} do not have the shape {feature['shape']} given in info.json")
    expected, kinds = ("whole numbers", "iu") if name in INDICES else ("numbers", "biuf")
    if not is_text and values.dtype.kind not in kinds:
        raise DataError(f"{path}: column {name!r} holds {column.type} with other values than {expected}, which are expected")
    rows: np.ndarray = values.reshape(len(column), int(np.prod(feature["shape"])))
    return rows.astype(np.float32) if name in (STATE, ACTION) else rows


def _size_bytes(values: np.ndarray) -> int:
    """Return the bytes of a column in memory, those of its texts included."""
    texts = sum(len(text) + _TEXT_BYTES for text in values[:, 0]) if values.dtype == object else 0
    return int(values.nbytes) + texts


def _to_numpy(array: pa.Array) -> np.ndarray:
    """Return the values of an array, numbers without a copy.

    Where `Array.to_numpy` can be avoided, it is: it imports pandas, in every rank.
    """
    if array.null_count == 0 and (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return np.from_dlpack(array)
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values
