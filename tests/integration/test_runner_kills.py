"""Runs whose command is killed by SIGKILL at random moments complete with the launches and tables of an undisturbed run."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.runner_kills import kill_runs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks

# `BENCHBOX_KILLS=100` takes five minutes.
KILLS = int(os.environ.get("BENCHBOX_KILLS", "2"))


def test_no_launch_is_lost_or_measured_twice_and_no_process_is_left(tmp_path: Path) -> None:
    seed = int(time.time())
    result = kill_runs(tmp_path, KILLS, seed)
    print(f"{result.kills} kills in {result.runs} runs, seed {seed}, {result.kills_with_record} with records on disk")
    problems = {
        name: getattr(result, name)
        for name in ("lost", "measured_twice", "differences", "orphans", "leftovers", "verify_problems")
    }
    assert {name: values for name, values in problems.items() if values} == {}, f"seed {seed}"
    assert result.kills == KILLS
