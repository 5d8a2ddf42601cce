"""Columns of many data files that are read in random order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import pytest

from benchbox.data.dataset.lerobot import open_dataset
from benchbox.data.format import tables
from tests.support.datasets import write_dataset

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.data.dataset.lerobot import LeRobotDataset

EPISODES, LENGTH = 12, 3


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with a file for each of its episodes."""
    root: Path = tmp_path_factory.mktemp("tables") / "data"
    return write_dataset(root, lengths=(LENGTH,) * EPISODES, tasks=("lift",) * EPISODES, version="v2.1")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of reads by file."""
    counts: Counter[str] = Counter()
    read_table = tables.read_table

    def counted(path: Path, columns: list[str]) -> object:
        counts[path.name] += 1
        return read_table(path, columns)

    monkeypatch.setattr(tables, "read_table", counted)
    return counts


def read_shuffled(dataset: LeRobotDataset) -> None:
    """Read all frames three times in random order, and compare them with their index."""
    rng = np.random.default_rng(0)
    for frame in np.concatenate([rng.permutation(len(dataset)) for _ in range(3)]).tolist():
        assert dataset.column("action", frame, frame + 1)[0, 0] == np.float32(frame / 10)
        assert dataset.column("frame_index", frame, frame + 1)[0, 0] == frame % LENGTH
        assert dataset.task(frame) == "lift"


def test_frames_of_many_files_in_random_order_read_each_file_once_or_twice(many_files: Path, reads: Counter[str]) -> None:
    """The first file of all shows which columns are used; of the others all of these are read at once, after the index."""
    read_shuffled(open_dataset(many_files))
    assert len(reads) == EPISODES
    assert sorted(reads.values()) == [2] * (EPISODES - 1) + [4]


def test_the_columns_in_memory_take_no_more_bytes_than_their_limit(
    many_files: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_CACHES", WeakSet())
    dataset = open_dataset(many_files)
    dataset.column("action", 0, 1)
    of_one_file = dataset._tables._size_bytes
    limit = 5 * of_one_file
    monkeypatch.setattr(tables, "MAX_CACHED_BYTES", limit)
    read_shuffled(dataset)
    cache = dataset._tables
    other = open_dataset(many_files)
    read_shuffled(other)
    assert of_one_file < other._tables._size_bytes <= limit / 2, "each of two datasets has half of it"
    assert of_one_file < cache._size_bytes <= limit
    assert cache._size_bytes == sum(values.nbytes for table in cache._tables.values() for values in table.columns.values())
    assert sum(reads.values()) > 3 * EPISODES, "files were forgotten and read again"


def test_a_file_that_is_larger_than_the_limit_is_kept_while_it_is_read(
    many_files: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_CACHED_BYTES", 1)
    dataset = open_dataset(many_files)
    for frame in range(LENGTH):
        dataset.column("action", frame, frame + 1)
        dataset.column("frame_index", frame, frame + 1)
    assert list(reads.values()) == [3]
