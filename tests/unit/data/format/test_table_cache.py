"""Columns of data files that are kept in memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchbox.data import open_dataset
from benchbox.data.format import tables
from benchbox.data.format.metadata import ACTION, STATE
from benchbox.data.format.tables import TableCache
from tests.support.datasets import write_robot

FILES, ROWS = 20, 40


@pytest.fixture(scope="module")
def many_files(tmp_path_factory):
    """A dataset whose episodes are in a file each."""
    root = write_robot(tmp_path_factory.mktemp("data") / "robot", cameras={}, state=4, action=4, lengths=[ROWS] * FILES)
    (file,) = (root / "data").rglob("*.parquet")
    table = pq.read_table(file)
    for number in range(FILES):
        pq.write_table(table.slice(number * ROWS, ROWS), file.with_name(f"file-{number:03}.parquet"))
    return open_dataset(root)


@pytest.fixture
def reads(monkeypatch):
    """Count how often each column of a file is read."""
    counter = Counter()
    read_column = tables.read_column

    def count(path, name, feature):
        counter[path.name, name] += 1
        return read_column(path, name, feature)

    monkeypatch.setattr(tables, "read_column", count)
    return counter


def read_twice(dataset) -> TableCache:
    """Read states and actions of every episode in two rounds, and check them."""
    cache = TableCache(dataset.metadata)
    for episode in list(dataset.episodes) * 2:
        start = episode.from_index
        for name in (STATE, ACTION):
            values = cache.rows(episode, name, start, start + 3)
            assert np.array_equal(values[:, 0], [0, 1, 2]), (episode.index, name)
    return cache


def test_the_columns_of_many_small_files_are_read_once(many_files, reads):
    read_twice(many_files)
    assert len({file for file, _ in reads}) == FILES
    assert set(reads.values()) == {1}


def test_files_that_were_not_used_for_the_longest_time_make_room(many_files, reads, monkeypatch):
    """State and action of 4 float32 and four columns of whole numbers take 64 bytes a row at most."""
    limit = 5 * ROWS * 64
    monkeypatch.setattr(tables, "MAX_CACHED_BYTES", limit)
    cache = read_twice(many_files)
    assert sum(reads[file, STATE] == 2 for file, name in reads if name == STATE) > FILES / 2, (
        "of 20 files in turn most are gone"
    )
    kept = sum(table.bytes for table in cache._tables.values())
    assert kept == cache._bytes <= limit
    assert 3 <= len(cache._tables) <= 10


def test_a_file_that_is_larger_than_the_limit_is_kept_while_it_is_in_use(many_files, reads, monkeypatch):
    monkeypatch.setattr(tables, "MAX_CACHED_BYTES", 1)
    cache = TableCache(many_files.metadata)
    episode = many_files.episodes[3]
    for index in range(episode.from_index, episode.to_index):
        cache.rows(episode, STATE, index, index + 1)
    assert reads["file-003.parquet", STATE] == 1
    assert len(cache._tables) == 1
