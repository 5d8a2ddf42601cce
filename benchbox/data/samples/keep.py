"""Keep-ranges: a file that says which frames of a dataset are drawn.

JSON, `{"<episode>": [[start, stop], ...]}`, or Parquet with the columns `episode_index`, `start` and `stop`. Both count frames
from the start of their episode, and `stop` is exclusive. A frame outside all ranges is never the current frame of a sample; it
may still be in the window of one.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchbox.data.format.metadata import read_table
from benchbox.errors import ConfigurationError, DataError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchbox.data.format.metadata import Episode

COLUMNS = ["episode_index", "start", "stop"]
MAX_PROBLEMS = 20


class KeptRange(NamedTuple):
    """Frames of an episode as a file states them, unchecked, and where it states them."""

    where: str
    episode: Any
    start: Any
    stop: Any


def read_keep_ranges(path: Path, episodes: Sequence[Episode]) -> np.ndarray:
    """Return the ranges of a file as segments (n, 2) int64 of the dataset's frames, in their order.

    Raises:
        DataError: the file is missing or damaged.
        ConfigurationError: with one problem for every range that is not one of the dataset, up to 20.
    """
    ranges = list(_read_parquet(path) if path.suffix == ".parquet" else _read_json(path))
    by_index = {episode.index: episode for episode in episodes}
    problems, segments = [], []
    for entry in ranges:
        problem = _problem(entry, by_index)
        if problem is not None:
            problems.append(Problem(f"{path}, {entry.where}", problem))
            continue
        first = by_index[entry.episode].from_index
        segments.append((first + entry.start, first + entry.stop, entry))
    segments.sort(key=lambda segment: segment[:2])
    for (_, stop, before), (start, _, entry) in pairwise(segments):
        if start < stop:
            message = f"frames {entry.start} to {entry.stop} overlap with {before.start} to {before.stop}, {before.where}"
            problems.append(Problem(f"{path}, {entry.where}", message, "merge them"))
    if problems:
        more = len(problems) - MAX_PROBLEMS
        summary = [Problem(str(path), f"{more} more problems of this kind")] if more > 0 else []
        raise ConfigurationError([*problems[:MAX_PROBLEMS], *summary])
    if not segments:
        raise DataError(f"{path}: keeps no frame; name at least one range, or leave keep out")
    return np.array([segment[:2] for segment in segments], dtype=np.int64)


def _problem(entry: KeptRange, episodes: dict[int, Episode]) -> str | None:
    """Return what is wrong with a range by itself."""
    if not all(_is_whole(value) for value in (entry.episode, entry.start, entry.stop)):
        values = ", ".join(str(value)[:20] for value in entry[1:])
        return f"episode, start and stop are {values}, and whole numbers are expected"
    if entry.episode not in episodes:
        return f"the dataset has no episode {entry.episode}"
    length = episodes[entry.episode].length
    if entry.start < 0:
        return f"start is {entry.start}, and frames are counted from 0"
    if entry.start >= entry.stop:
        kind = "empty" if entry.start == entry.stop else "reversed"
        return f"the range {entry.start} to {entry.stop} of episode {entry.episode} is {kind}; stop is exclusive"
    if entry.stop > length:
        return f"stop is {entry.stop}, and episode {entry.episode} has {length} frames"
    return None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_json(path: Path) -> Iterator[KeptRange]:
    """Yield the ranges of a JSON file.

    Raises:
        DataError: it is not a mapping of episodes to lists of pairs.
    """
    try:
        pairs = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=list)
    except FileNotFoundError:
        raise DataError(f"{path}: the file is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise DataError(f'{path}: expected {{"<episode>": [[start, stop], ...]}}')
    names: set[str] = set()
    for name, ranges in pairs:
        if name in names:
            raise DataError(f"{path}, episode {name!r}: the key occurs twice; merge its ranges")
        names.add(name)
        if not name.isdecimal():
            raise DataError(f"{path}, episode {name!r}: the key is not the number of an episode")
        if not isinstance(ranges, list):
            raise DataError(f"{path}, episode {name!r}: expected a list of ranges [start, stop]")
        for number, pair in enumerate(ranges):
            if not isinstance(pair, list) or len(pair) != 2:
                raise DataError(f"{path}, episode {name!r}, range {number}: expected [start, stop]")
            yield KeptRange(f"episode {name!r}, range {number}", int(name), *pair)


def _read_parquet(path: Path) -> Iterator[KeptRange]:
    """Yield the ranges of a Parquet file.

    Raises:
        DataError: it is damaged or lacks a column.
    """
    table = read_table(path)
    missing = [column for column in COLUMNS if column not in table.column_names]
    if missing:
        raise DataError(f"{path}: no column {missing[0]!r}; the columns are {', '.join(COLUMNS)}")
    columns = [table.column(column).to_pylist() for column in COLUMNS]
    for row, values in enumerate(zip(*columns, strict=True)):
        yield KeptRange(f"row {row}", *values)
