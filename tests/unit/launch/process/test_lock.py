"""Exclusive use of a run directory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import ConfigurationError
from benchbox.launch.process.lock import lock_run_directory

if TYPE_CHECKING:
    from pathlib import Path


def test_a_second_run_in_a_directory_is_refused_and_a_dead_holder_is_not_in_the_way(tmp_path: Path) -> None:
    with lock_run_directory(tmp_path / "run"):
        message = rf"another run \(process {os.getpid()}\) is using it"
        with pytest.raises(ConfigurationError, match=message), lock_run_directory(tmp_path / "run"):
            pass
    (tmp_path / "run" / ".lock").write_text("999999\n")  # left by a run that was killed
    with lock_run_directory(tmp_path / "run"):
        pass


def test_a_run_directory_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--out"), lock_run_directory(tmp_path / "file" / "run"):
        pass
