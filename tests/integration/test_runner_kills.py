"""Runs whose command is killed by SIGKILL at random moments complete with the launches and tables of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.runner_kills import MATRIX, POLICIES, kill_runs

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


def is_predicting(pid: int) -> bool:
    """Return whether the process that predicts runs, and has received its work."""
    with suppress(psutil.NoSuchProcess):
        children = [child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())]
        return any(child.cpu_times().user > 0.2 for child in children)
    return False


def test_a_signal_while_a_run_predicts_ends_it_as_stopped_and_without_warnings_of_python(tmp_path: Path) -> None:
    (tmp_path / "kills.yaml").write_text(MATRIX.replace("[2, 3, 4]", "[2]"))
    command = [sys.executable, "-m", "benchbox.cli.app", "run", "kills.yaml", "--policy-dir", str(POLICIES), "--estimate"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}  # where no prediction is known
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("predicting") for line in process.stdout)
        while not is_predicting(process.pid):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == ""
