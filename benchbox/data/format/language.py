"""Texts of an episode in the format of LeRobot 0.6, in columns of its data files that `lerobot-annotate` fills.

`language_persistent` is a list of rows with the fields role, content, style, timestamp, camera and tool_calls. A row is in
force from its timestamp (seconds from the start of the episode) until the next row of its style. Every frame of an episode
has the same list. The styles are subtask, plan, memory, motion and task_aug. `language_events` is a list of rows without
timestamps, which belong to the frame they are stored at, with the styles interjection, vqa and trace, or calls of tools.
Source: lerobot 0.6.1, `datasets/language.py`, `datasets/language_render.py` (`active_at`), `annotations/steerable_pipeline`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchbox.data.format.cells import NestedCells
from benchbox.data.format.metadata import read_table
from benchbox.errors import DataError, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from benchbox.data.format.metadata import Episode

PERSISTENT = "language_persistent"
DTYPE = "language"
STYLES = {"response": "subtask", "memory": "memory"}
"""Styles of persistent rows by the text of a policy that they are."""

_MAX_CACHED_EPISODES = 64


class PersistentTexts:
    """Persistent rows of episodes, read when an episode is first used. The most recently used episodes are kept.

    Args:
        locate: function that returns the data file of an episode, and the number of its first row there.
    """

    def __init__(self, locate: Callable[[Episode], tuple[Path, int]]) -> None:
        self._locate = locate
        self._cells = NestedCells([PERSISTENT], max_cached_bytes=0)
        self._episodes: OrderedDict[int, dict[str, tuple[list[float], list[str]]]] = OrderedDict()

    def text(self, episode: Episode, style: str, time_s: float) -> str:
        """Return the content of the row of a style in force at a time of the episode, or an empty string without one.

        Raises:
            DataError: the data file is missing or damaged, or its rows contradict one another.
        """
        times, texts = self._rows(episode).get(style, ([], []))
        row = bisect_right(times, time_s) - 1
        return texts[row] if row >= 0 else ""

    def _rows(self, episode: Episode) -> dict[str, tuple[list[float], list[str]]]:
        """Return the times and texts of every style, in the order of time."""
        if episode.index not in self._episodes:
            path, first_row = self._locate(episode)
            where = f"{path}: row {first_row}, {PERSISTENT}"
            try:
                rows = self._cells.cell(path, PERSISTENT, first_row)
            except FileNotFoundError:
                raise DataError(f"{path}: the file is missing") from None
            except (OSError, IndexError, KeyError, pa.ArrowException) as error:
                raise DataError(f"{where}: not readable ({reason_of(error)})") from None
            self._episodes[episode.index] = _by_style(rows, where)
            while len(self._episodes) > _MAX_CACHED_EPISODES:
                self._episodes.popitem(last=False)
        self._episodes.move_to_end(episode.index)
        return self._episodes[episode.index]


def count_styles(path: Path, column: str, rows: Iterable[int]) -> Counter[str]:
    """Count the annotations of each style in some rows of a data file.

    Raises:
        DataError: the file is missing or damaged, or an annotation has no style.
    """
    cells = read_table(path, [column]).column(column)
    counts: Counter[str] = Counter()
    for row in rows:
        for annotation in _annotations(cells[row].as_py(), f"{path}: row {row}, {column}"):
            counts[str(annotation.get("style") or "tool call")] += 1
    return counts


def _annotations(cell: Any, where: str) -> list[dict[str, Any]]:
    if cell is None:
        return []
    if not isinstance(cell, list) or not all(isinstance(annotation, dict) for annotation in cell):
        raise DataError(f"{where}: a list of annotations is expected; write it again with lerobot-annotate")
    return cell


def _by_style(cell: Any, where: str) -> dict[str, tuple[list[float], list[str]]]:
    """Return the times and texts of the rows of a cell by their style."""
    styles: dict[str, tuple[list[float], list[str]]] = {}
    rows = []
    for number, annotation in enumerate(_annotations(cell, where)):
        time_s = annotation.get("timestamp")
        if not isinstance(time_s, float | int) or not np.isfinite(time_s):
            raise DataError(f"{where}: annotation {number} has the timestamp {time_s!s:.40}; a number of seconds is expected")
        # Timestamps of frames are float32, and so are those of annotations in LeRobot's features; files may hold float64.
        rows.append((float(np.float32(time_s)), str(annotation.get("style")), annotation.get("content")))
    for time_s, style, content in sorted(rows, key=lambda row: row[0]):
        times, texts = styles.setdefault(style, ([], []))
        if time_s in times and style in STYLES.values():
            raise DataError(f"{where}: two annotations of style {style!r} begin at {time_s:g} s; remove one of them")
        times.append(time_s)
        texts.append("" if content is None else str(content))
    return styles
