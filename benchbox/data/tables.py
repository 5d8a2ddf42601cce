"""Columns of the data files of a dataset, read on demand."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchbox.data.metadata import ACTION, STATE, read_table
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_CACHED_TABLES = 8


class TableCache:
    """Columns of the most recently used data files, read on first use."""

    def __init__(self, features: Mapping[str, Mapping[str, Any]]) -> None:
        self._features = features
        self._tables: OrderedDict[Path, tuple[int, dict[str, np.ndarray]]] = OrderedDict()  # index of the first row, columns

    def rows(self, path: Path, name: str, start: int, stop: int) -> np.ndarray:
        """Return the values (frames, D) of a column from frame `start` up to `stop` (exclusive).

        There are fewer if the file ends earlier. State and action are float32.

        Raises:
            DataError: the file is missing or damaged, or its values do not have the shape of the feature.
        """
        file_start, columns = self._open(path)
        if name not in columns:
            columns[name] = self._read_column(path, name)
        return columns[name][start - file_start : stop - file_start]

    def _open(self, path: Path) -> tuple[int, dict[str, np.ndarray]]:
        if path not in self._tables:
            index = self._read_column(path, "index")[:, 0]
            if len(index) == 0 or not np.array_equal(index, np.arange(index[0], index[0] + len(index))):
                raise DataError(f"{path}: its rows are not consecutive frames")
            self._tables[path] = (int(index[0]), {})
        self._tables.move_to_end(path)
        while len(self._tables) > MAX_CACHED_TABLES:
            self._tables.popitem(last=False)
        return self._tables[path]

    def _read_column(self, path: Path, name: str) -> np.ndarray:
        column = read_table(path, [name]).column(name).combine_chunks()
        feature = self._features[name]
        if feature["dtype"] == "string":
            column = column.fill_null("")
        if column.null_count:
            raise DataError(f"{path}: column {name!r} has missing values")
        is_nested = pa.types.is_nested(column.type)
        values: np.ndarray = (column.flatten() if is_nested else column).to_numpy(zero_copy_only=False)
        if values.size != len(column) * int(np.prod(feature["shape"])):
            raise DataError(f"{path}: the values of {name!r} do not have the shape {feature['shape']} given in info.json")
        rows = values.reshape(len(column), -1)
        return rows.astype(np.float32) if name in (STATE, ACTION) else rows
