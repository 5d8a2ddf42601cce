"""Following a file of JSON lines that a training appends to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchbox.store.files import complete_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class RowFollower:
    """Passes on the rows that are appended to a file. Every part of the file is read once.

    To be read only after the training has removed the rows of steps that it repeats.

    Args:
        first_step: rows of earlier steps, from before the training was resumed, are left out.
    """

    def __init__(self, path: Path, on_row: Callable[[Mapping[str, Any]], None], *, first_step: int) -> None:
        self._path = path
        self._on_row = on_row
        self._first_step = first_step
        self._offset = 0

    def read(self) -> None:
        """Pass on the new rows. The last line is left for the next call while it is being written."""
        for line in complete_lines(self._path, self._offset):
            self._offset += len(line)
            row = json.loads(line)
            if row["step"] >= self._first_step:
                self._on_row(row)
