"""Failures of a training that are worth a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benchbox.launch.restarts import is_restartable, read_restarts, record_restart
from benchbox.launch.supervise.outcome import Outcome

if TYPE_CHECKING:
    from pathlib import Path


def outcome(status: str, kind: str, stage: str | None = "train") -> Outcome:
    error: Any = {"type": kind, "message": "said so\nand more", "rank": 1, "phase": None, "traceback": None, "stage": stage}
    return Outcome(status, error)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (outcome("crash", "Killed", "build"), True),
        (outcome("crash", "Terminated"), True),
        (outcome("crash", "ExitError"), True),
        (outcome("crash", "RuntimeError"), True),
        (outcome("crash", "RuntimeError", "build"), False),  # before the first step: it would be raised again
        (outcome("crash", "DataError"), False),
        (outcome("crash", "LaunchError", None), False),
        (outcome("unsupported", "ConfigurationError"), False),
        (outcome("nan", "NonFiniteError"), False),
        (outcome("oom", "OutOfMemoryError"), False),
        (outcome("hang", "Hang"), False),
        (outcome("interrupted", "Interrupted"), False),
        (Outcome("ok"), False),
    ],
)
def test_only_a_process_that_died_or_an_error_of_a_step_is_worth_a_restart(ending: Outcome, expected: bool) -> None:
    assert is_restartable(ending) is expected


def test_the_count_and_the_files_of_failed_ranks_are_kept_over_invocations(tmp_path: Path) -> None:
    for invocation in (1, 2):
        (tmp_path / "launch").mkdir()
        (tmp_path / "launch/rank1.log").write_text(str(invocation))
        restart = record_restart(tmp_path, outcome("crash", "Killed"), 1, 3)
        assert restart.reason == "rank 1: Killed: said so"
        assert restart.from_step == 0
    assert [entry["files"] for entry in read_restarts(tmp_path)] == ["launch-failed-1", "launch-failed-2"]
    assert (tmp_path / "launch-failed-2/rank1.log").read_text() == "2"
