"""Files that are written atomically."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from benchbox.store.files import atomic_file, write_text

if TYPE_CHECKING:
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
