"""Ending the processes of a job."""

from __future__ import annotations

import os
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchbox.launch.process import cold, warm
from benchbox.launch.process.processes import JOB_VARIABLE, end_processes, signal_processes


def test_a_leader_that_has_not_started_its_session_yet_is_ended() -> None:
    """A stop may come between the fork of the leader and its first instruction: all its ranks would run to their end."""
    leader = subprocess.Popen(["sleep", "600"])
    try:
        end_processes("no job", session=leader.pid, grace_s=5.0)
        assert leader.poll() == -signal.SIGTERM
    finally:
        leader.kill()
        leader.wait()


def test_a_signal_to_a_rank_does_not_reach_the_processes_that_it_has_started() -> None:
    """SIGUSR1, by which a training is asked to stop, would end its data loaders."""
    variables = {**os.environ, JOB_VARIABLE: "a job of this test"}
    rank, loader = (subprocess.Popen(["sleep", "600"], env=variables) for _ in range(2))
    try:
        signal_processes("a job of this test", [rank.pid], signal.SIGUSR1)
        assert rank.wait(60) == -signal.SIGUSR1
        end_processes("a job of this test", grace_s=5.0)
        assert loader.wait(60) == -signal.SIGTERM
    finally:
        for process in (rank, loader):
            process.kill()
            process.wait()


@pytest.mark.parametrize("group", [warm._ForkedGroup, cold._TorchrunGroup])
def test_a_rank_that_ends_before_its_signal_needs_none(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system may signal the ranks as well."""
    ended, alive = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    try:
        processes = [psutil.Process(rank.pid) for rank in (ended, alive)]
        ended.kill()
        ended.wait()
        monkeypatch.setattr("benchbox.launch.process.processes.find_processes", lambda *_, **__: processes)
        group.signal_ranks(SimpleNamespace(_job_id="job", _leader=1), [ended.pid, alive.pid], signal.SIGUSR1)
        assert alive.wait(60) == -signal.SIGUSR1, "the next one gets its own"
    finally:
        alive.kill()
        alive.wait()
