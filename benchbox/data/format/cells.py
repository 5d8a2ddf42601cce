"""Single cells of nested columns of data files, of which only the row groups that contain them are read."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pyarrow as pa

# Of the instances of a process that name no bytes of their own, each with an equal part. LeRobot writes an episode as a row
# group, so that shuffled frames come from any of them, and with images one may take 100 MB: a count of groups would read most
# of the small ones again for every frame, and keep too many of the large ones.
MAX_CACHED_BYTES = 256 * 2**20
_CACHES: WeakSet[NestedCells] = WeakSet()  # of the process, those that share these bytes and have read a row group


class NestedCells:
    """Cells of some columns. The most recently used row groups are kept, up to a number of bytes, and at least one."""

    def __init__(self, columns: Sequence[str], max_cached_bytes: int | None = None) -> None:
        self._columns = list(columns)
        self._max_cached_bytes = max_cached_bytes
        self._size_bytes = 0
        self._groups: OrderedDict[tuple[Path, int], pa.Table] = OrderedDict()
        self._first_rows: dict[Path, list[int]] = {}  # of the row groups of a file, and the number of its rows

    def cell(self, path: Path, column: str, row: int) -> Any:
        """Return the value in a row of a data file as Python objects.

        Raises:
            IndexError: the file has no such row.
            KeyError: it has no such column.
            OSError, pyarrow.ArrowException: the file is missing or damaged.
        """
        if path not in self._first_rows:
            footer = pq.ParquetFile(path).metadata
            sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
            self._first_rows[path] = [0, *accumulate(sizes)]
        first_rows = self._first_rows[path]
        if not 0 <= row < first_rows[-1]:
            raise IndexError(f"the file has {first_rows[-1]} rows")
        group = bisect_right(first_rows, row) - 1
        if (path, group) not in self._groups:
            table = pq.ParquetFile(path).read_row_group(group, columns=self._columns, use_threads=False)
            self._groups[path, group] = table
            self._size_bytes += table.nbytes
            limit = self._max_cached_bytes
            if limit is None:
                _CACHES.add(self)
                limit = MAX_CACHED_BYTES // len(_CACHES)
            while self._size_bytes > limit and len(self._groups) > 1:
                self._size_bytes -= self._groups.popitem(last=False)[1].nbytes
        self._groups.move_to_end((path, group))
        return self._groups[path, group].column(column)[row - first_rows[group]].as_py()
