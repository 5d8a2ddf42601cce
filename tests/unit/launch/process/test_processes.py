"""Ending the processes of a job."""

from __future__ import annotations

import signal
import subprocess

from benchbox.launch.process.processes import end_processes


def test_a_leader_that_has_not_started_its_session_yet_is_ended():
    """A stop may come between the fork of the leader and its first instruction: all its ranks would run to their end."""
    leader = subprocess.Popen(["sleep", "600"])
    try:
        end_processes("no job", session=leader.pid, grace_s=5.0)
        assert leader.poll() == -signal.SIGTERM
    finally:
        leader.kill()
        leader.wait()
