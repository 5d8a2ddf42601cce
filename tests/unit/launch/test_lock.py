"""Exclusive use of a run directory."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import ConfigurationError
from benchbox.launch.lock import lock_run_directory

if TYPE_CHECKING:
    from pathlib import Path


def test_a_second_run_in_a_directory_is_refused_and_a_dead_holder_is_not_in_the_way(tmp_path: Path) -> None:
    with lock_run_directory(tmp_path / "run"):
        message = rf"another run \(process {os.getpid()}\) is using it"
        with pytest.raises(ConfigurationError, match=message), lock_run_directory(tmp_path / "run"):
            pass
    (tmp_path / "run" / ".lock").write_text("999999999\n")  # left by a run that was killed
    with lock_run_directory(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_file_system_without_locks_is_not_taken_for_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(ConfigurationError, match=r"run: cannot be locked \(No locks available\); .* --out"):  # noqa: SIM117
        with lock_run_directory(tmp_path / "run"):
            pass


def test_a_run_directory_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--out"), lock_run_directory(tmp_path / "file" / "run"):
        pass


def test_who_gets_the_lock_removes_what_a_killed_run_was_writing(tmp_path):
    """And nothing else: not files of the user, nor those of whoever holds the lock."""
    code = (
        "import os, sys; from pathlib import Path; from benchbox.store.files import atomic_file\n"
        "with atomic_file(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    for name in ("report.md", "figures/pareto.svg", "cells/a/launch-1.json"):
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=False).returncode == -9
    (tmp_path / "notes.tmp").write_text("of the user")
    assert len(list(tmp_path.rglob(".*.tmp"))) == 3
    with lock_run_directory(tmp_path):
        assert not list(tmp_path.rglob(".*.tmp"))
        (tmp_path / ".own.tmp").write_text("")
        with pytest.raises(ConfigurationError), lock_run_directory(tmp_path):
            pass
        assert (tmp_path / ".own.tmp").exists()
    assert (tmp_path / "notes.tmp").exists()


def test_what_a_killed_run_left_is_removed_but_not_what_another_node_is_writing(tmp_path) -> None:
    """Node 1 may come first, and be between its temporary file and the final one."""
    left, written = tmp_path / ".run.json.abcd1234.tmp", tmp_path / "nodes" / ".node-1.json.abcd1234.tmp"
    written.parent.mkdir()
    for path in (left, written):
        path.touch()
    with lock_run_directory(tmp_path):
        assert not left.exists()
        assert written.exists()


def test_files_of_others_and_of_a_run_below_are_left_by_a_run_that_begins(tmp_path) -> None:
    others = [".notes.tmp", ".thesis.tex.abcd1234.tmp", "runs/other/.run.json.abcd1234.tmp", "src/.module.json.abcd1234.tmp"]
    left = [".report.html.abcd1234.tmp", "cells/a/.launch-1.json.ab_d1234.tmp", "figures/.pareto.svg.abcd1234.tmp"]
    for name in (*others, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with lock_run_directory(tmp_path):
        assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob(".*.tmp")) == sorted(others)
