"""Files that are written atomically, and JSON files that are not what is read."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from benchbox.audit.selection import load_baseline
from benchbox.errors import BenchboxError
from benchbox.store.baseline import read_baseline
from benchbox.store.benchmarks import read_benchmarks
from benchbox.store.files import atomic_file, write_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_written_file_can_be_read_by_others(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "{}")
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o644


def test_a_write_that_is_interrupted_leaves_the_file_before_it_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "old")

    def is_interrupted() -> None:
        with atomic_file(tmp_path / "a.json") as stream:
            stream.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        is_interrupted()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


@pytest.mark.parametrize(
    ("read", "remedy"),
    [
        (load_baseline, "give the output of benchbox audit-precision ... --format json"),
        (read_baseline, "`benchbox baseline promote` writes a baseline"),
        (read_benchmarks, "pytest --benchmark-json FILE writes it"),
    ],
)
@pytest.mark.parametrize("content", [b"import torch\n", b"", b"[1]", b"\xff", b"[" * 100_000])
def test_a_file_that_the_user_names_is_not_to_be_deleted(
    tmp_path: Path, read: Callable[[Path], object], remedy: str, content: bytes
) -> None:
    """`audit-precision --baseline train.py` is a mistake in the command, and `train.py` has nothing wrong."""
    file = tmp_path / "train.py"
    file.write_bytes(content)
    with pytest.raises(BenchboxError) as caught:
        read(file)
    assert str(caught.value).endswith(f"; {remedy}")
    assert "delete" not in str(caught.value)
