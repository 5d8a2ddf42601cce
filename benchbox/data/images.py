"""Images that a dataset stores encoded, PNG or JPEG, in the rows of its tables or in files that the rows name."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import av
import pyarrow as pa
import pyarrow.parquet as pq

from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

MAX_CACHED_GROUPS = 8


class ImageColumns:
    """Encoded images of data files, of which the most recently used row groups are kept."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self._root = root
        self._names = list(names)
        self._groups: OrderedDict[tuple[Path, int], pa.Table] = OrderedDict()
        self._first_rows: dict[Path, list[int]] = {}  # of the row groups of a file, and the number of its rows

    def image(self, path: Path, name: str, row: int) -> np.ndarray:
        """Return the image in a row of a data file: (H, W, 3) uint8 RGB.

        Raises:
            DataError: the file or the row is missing or damaged, or the image cannot be decoded.
        """
        where = f"{path}: row {row}, {name}"
        try:
            cell = self._cell(path, name, row)
            encoded = cell["bytes"] if cell.get("bytes") is not None else (self._root / cell["path"]).read_bytes()
            with av.open(io.BytesIO(encoded)) as container:
                frame = next(container.decode(video=0))
            pixels: np.ndarray = frame.to_ndarray(format="rgb24")
        except (
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            StopIteration,
            OSError,
            av.FFmpegError,
            pa.ArrowException,
        ) as error:
            raise DataError(
                f"{where}: not an image ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            ) from None
        return pixels

    def _cell(self, path: Path, name: str, row: int) -> dict[str, Any]:
        """Return `bytes`, or None and the `path` of a file."""
        if path not in self._first_rows:
            footer = pq.ParquetFile(path).metadata
            sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
            self._first_rows[path] = [sum(sizes[:group]) for group in range(len(sizes) + 1)]
        first_rows = self._first_rows[path]
        if not 0 <= row < first_rows[-1]:
            raise IndexError(f"the file has {first_rows[-1]} rows")
        group = next(number for number, first_row in enumerate(first_rows) if row < first_row) - 1
        if (path, group) not in self._groups:
            self._groups[path, group] = pq.ParquetFile(path).read_row_group(group, columns=self._names, use_threads=False)
            while len(self._groups) > MAX_CACHED_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end((path, group))
        cell: dict[str, Any] = self._groups[path, group].column(name)[row - first_rows[group]].as_py()
        return cell
