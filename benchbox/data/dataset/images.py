"""Images that a dataset stores encoded, PNG or JPEG, in the rows of its tables or in files that the rows name."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import av
import pyarrow as pa

from benchbox.data.format.cells import NestedCells
from benchbox.errors import DataError, reason_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np


class ImageColumns:
    """Encoded images of data files, of which the most recently used row groups are kept."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self._root = root
        self._cells = NestedCells(names)

    def image(self, path: Path, name: str, row: int) -> np.ndarray:
        """Return the image in a row of a data file: (H, W, 3) uint8 RGB.

        Raises:
            DataError: the file or the row is missing or damaged, or the image cannot be decoded.
        """
        where = f"{path}: row {row}, {name}"
        try:
            cell = self._cells.cell(path, name, row)
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
            raise DataError(f"{where}: not an image ({reason_of(error)})") from None
        return pixels
