"""Row groups with nested cells stay in memory up to a number of bytes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchbox.data.format import cells
from benchbox.data.format.cells import NestedCells

if TYPE_CHECKING:
    from pathlib import Path

GROUPS, ROWS = 40, 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A data file with a row group for each episode, as LeRobot writes them."""
    images = [{"bytes": bytes([row]) * 1000, "path": "frame.png"} for row in range(GROUPS * ROWS)]
    path = tmp_path / "images.parquet"
    pq.write_table(pa.table({"image": images}), path, row_group_size=ROWS)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Number of reads by row group."""
    counts: Counter[int] = Counter()
    read = pq.ParquetFile.read_row_group

    def counted(file: pq.ParquetFile, group: int, **options: object) -> pa.Table:
        counts[group] += 1
        return read(file, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    monkeypatch.setattr(cells, "_CACHES", WeakSet())
    return counts


def read_shuffled(cache: NestedCells, file: Path) -> None:
    """Read all rows three times in random order."""
    rng = np.random.default_rng(0)
    for row in np.concatenate([rng.permutation(GROUPS * ROWS) for _ in range(3)]).tolist():
        assert cache.cell(file, "image", row)["bytes"][0] == row


def test_rows_in_random_order_read_every_row_group_once(file: Path, reads: Counter[int]) -> None:
    read_shuffled(NestedCells(["image"]), file)
    assert sorted(reads.values()) == [1] * GROUPS


def test_the_row_groups_in_memory_take_no_more_bytes_than_their_limit(
    file: Path, reads: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = NestedCells(["image"]), NestedCells(["image"])
    first.cell(file, "image", 0)
    of_one_group = first._size_bytes
    monkeypatch.setattr(cells, "MAX_CACHED_BYTES", 6 * of_one_group)
    read_shuffled(first, file)
    read_shuffled(second, file)
    assert first._size_bytes == sum(table.nbytes for table in first._groups.values()) == 6 * of_one_group
    assert second._size_bytes == 3 * of_one_group, "each of two has half of it"
    assert sum(reads.values()) > 3 * GROUPS, "row groups were forgotten and read again"


def test_a_row_group_that_is_larger_than_the_limit_is_kept_while_it_is_read(file: Path, reads: Counter[int]) -> None:
    cache = NestedCells(["image"], max_cached_bytes=0)
    for row in range(2 * ROWS):
        cache.cell(file, "image", row)
    assert reads == {0: 1, 1: 1}
    assert not cells._CACHES, "it takes nothing from the others"
