"""Columns of the data files of a dataset, read on demand."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchbox.data.format.metadata import ACTION, STATE, read_table
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_CACHED_TABLES = 8
INDICES = ("index", "episode_index", "frame_index", "task_index", "subtask_index")


class TableCache:
    """Columns of the most recently used data files, read on first use."""

    def __init__(self, features: Mapping[str, Mapping[str, Any]]) -> None:
        self._features = features
        self._tables: OrderedDict[Path, dict[str, np.ndarray]] = OrderedDict()  # columns
        self._last: tuple[Path | None, dict[str, np.ndarray]] = (None, {})

    def rows(self, path: Path, name: str, start: int, stop: int) -> np.ndarray:
        """Return the values (rows, D) of a column from row `start` of the file up to `stop` (exclusive).

        There are fewer if the file ends earlier. State and action are float32.

        Raises:
            DataError: the file is missing or damaged, or its values do not have the shape of the feature.
        """
        columns = self._open(path)
        if name not in columns:
            columns[name] = read_column(path, name, self._features[name])
        return columns[name][start:stop]

    def _open(self, path: Path) -> dict[str, np.ndarray]:
        if path is self._last[0]:  # comparing paths takes longer than reading a row
            return self._last[1]
        if path not in self._tables:
            index = read_column(path, "index", self._features["index"])
            gaps = np.flatnonzero(np.diff(index[:, 0]) != 1)
            if len(gaps) or not len(index):
                where = f"row {gaps[0] + 1} does not follow the one before it" if len(gaps) else "it has no rows"
                raise DataError(f"{path}: its rows are not consecutive frames: {where}")
            self._tables[path] = {"index": index}
        self._tables.move_to_end(path)
        while len(self._tables) > MAX_CACHED_TABLES:
            self._tables.popitem(last=False)
        self._last = path, self._tables[path]
        return self._last[1]


def read_column(path: Path, name: str, feature: Mapping[str, Any]) -> np.ndarray:
    """Read a column of a data file: the values (rows, D) of a feature, float32 those of state and action.

    Raises:
        DataError: the file is missing or damaged, or its values are missing or do not have the shape of the feature.
    """
    column = read_table(path, [name]).column(name).combine_chunks()
    is_text = feature["dtype"] == "string"
    if is_text:
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_null(column.type)):
            raise DataError(f"{path}: column {name!r} holds {column.type} with other values than texts, which are expected")
    elif column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(f"{path}: column {name!r} has no value in row {row}")
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        values = _to_numpy(column.flatten())
    elif is_text:
        values = np.array([text or "" for text in column.to_pylist()], dtype=object)
    else:
        values = _to_numpy(column)
    if values.size != len(column) * int(np.prod(feature["shape"])):
        raise DataError(f"{path}: the values of {name!r} do not have the shape {feature['shape']} given in info.json")
    expected, kinds = ("whole numbers", "iu") if name in INDICES else ("numbers", "biuf")
    if not is_text and values.dtype.kind not in kinds:
        raise DataError(f"{path}: column {name!r} holds {column.type} with other values than {expected}, which are expected")
    rows: np.ndarray = values.reshape(len(column), int(np.prod(feature["shape"])))
    return rows.astype(np.float32) if name in (STATE, ACTION) else rows


def _to_numpy(array: pa.Array) -> np.ndarray:
    """Return the values of an array, numbers without a copy.

    Where `Array.to_numpy` can be avoided, it is: it imports pandas, in every rank.
    """
    if array.null_count == 0 and (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return np.from_dlpack(array)
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values
