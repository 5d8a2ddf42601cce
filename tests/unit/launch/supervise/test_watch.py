"""Watching a group until it ends."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from benchbox.launch.job import Job, RankGroup
from benchbox.launch.supervise import watch as watching
from benchbox.launch.supervise.group import ignore_progress, never_stop
from benchbox.launch.supervise.watch import watch
from benchbox.store.events import EventWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Group(RankGroup):
    """A group whose processes have ended, or run without end."""

    def __init__(self, exit_code: int | None) -> None:
        self._exit_code = exit_code

    def poll(self, timeout_s: float = 0.0) -> int | None:
        time.sleep(timeout_s)
        return self._exit_code

    def signal_ranks(self, pids: Sequence[int], number: int) -> None:
        self.signalled = [*pids, number]


@pytest.mark.parametrize(("exit_code", "cause"), [(0, "ended"), (1, "stopped")])
def test_a_launch_that_ended_well_before_it_was_stopped_is_no_interrupted_one(
    exit_code: int, cause: str, tmp_path: Path
) -> None:
    job = Job(config={}, ranks=1, folder=tmp_path, timeout_s=None, hang_after_s=1.0)
    assert watch(job, Group(exit_code), ignore_progress, lambda: True, never_stop).cause == cause


def test_ranks_get_their_time_to_fail_after_another_however_short_the_limit_of_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_FAILING_LIMIT_S", 0.5)
    job = Job(config={}, ranks=2, folder=tmp_path, timeout_s=0.1, hang_after_s=0.1)
    for rank in range(2):
        events = EventWriter(job.events(rank), rank)
        events.write("progress", stage="measure", step=1, of=3, phase="backward")
    events.write("error", type="DistBackendError", message="it broke", secondary=True)
    assert watch(job, Group(None), ignore_progress, never_stop, never_stop).cause == "failing"


def test_only_ranks_of_this_node_are_asked_to_stop(tmp_path: Path) -> None:
    """A process id of another node may be that of any process here."""
    job = Job(config={}, ranks=2, folder=tmp_path, timeout_s=1.0, hang_after_s=60.0, nnodes=2)
    for rank in range(2):
        EventWriter(job.events(rank), rank).write("start", pid=100 + rank)
    group = Group(None)
    watch(job, group, ignore_progress, lambda: hasattr(group, "signalled"), lambda: True)
    assert group.signalled == [100, signal.SIGUSR1]
