"""The process of a rank: it reports how it ends, and it ends with its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from benchbox.store.events import read_events

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[3]


def start_rank(folder: Path) -> subprocess.Popen[bytes]:
    """Start a rank with a job that has no cell, so that it fails when it reads it."""
    job = {"kind": "measure", "measure": {}, "policy_dirs": [], "launch": 1, "out": str(folder)}
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "benchbox.worker", str(folder / "job.json")]
    return subprocess.Popen(command, env={**os.environ, "RANK": "3", "PYTHONPATH": str(ROOT)})


def events_of(folder: Path) -> list[dict[str, Any]]:
    return read_events(folder / "events-rank3.jsonl")[0]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_rank_that_fails_reports_its_error_and_exits_with_1(tmp_path: Path) -> None:
    assert start_rank(tmp_path).wait(120) == 1
    events = events_of(tmp_path)
    assert events[0]["event"] == "start"
    error = events[-1]
    assert (error["event"], error["rank"], error["status"], error["type"]) == ("error", 3, "crash", "KeyError")
    assert (error["stage"], error["step"], error["phase"]) == ("build", None, None)
    assert "measuring.py" in error["traceback"]
    assert "KeyError: 'cell'" in (tmp_path / "rank3.log").read_text()


def test_a_rank_that_is_terminated_reports_it(tmp_path: Path) -> None:
    process = start_rank(tmp_path)
    wait_until(lambda: bool(events_of(tmp_path)))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert events_of(tmp_path)[-1]["event"] == "terminated"
    assert events_of(tmp_path)[-1]["signal"] == "SIGTERM"


def test_a_rank_that_crashes_in_c_code_leaves_the_stacks_of_its_threads_in_its_log(tmp_path: Path) -> None:
    process = start_rank(tmp_path)
    wait_until(lambda: bool(events_of(tmp_path)))
    process.send_signal(signal.SIGSEGV)
    assert process.wait(60) == -signal.SIGSEGV
    log = (tmp_path / "rank3.log").read_text()
    assert log.startswith("Fatal Python error: Segmentation fault\n")
    assert f'File "{ROOT / "benchbox" / "worker" / "rank.py"}", line ' in log


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a process when its parent dies")
def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    child = (
        "import pathlib, signal, sys, time; from benchbox.worker.parent import signal_on_parent_death\n"
        "signal_on_parent_death(signal.SIGKILL)\n"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)\n"
    )
    parent = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]])\n"
        "print(child.pid, flush=True); child.wait()\n"
    )
    command = [sys.executable, "-c", parent, child, str(tmp_path / "ready")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    try:
        wait_until((tmp_path / "ready").exists)
        process.kill()
        process.wait()
        wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
