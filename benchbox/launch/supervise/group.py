"""A job from the start of its processes to the end of the last of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from benchbox.errors import RecordError
from benchbox.launch.supervise.outcome import classify_outcome, unreadable_events
from benchbox.launch.supervise.stacks import ask_for_stacks
from benchbox.launch.supervise.watch import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchbox.launch.job import Job, Launcher
    from benchbox.launch.supervise.outcome import Outcome
    from benchbox.launch.supervise.trace import Trace

_TAIL_BYTES = 2000


def ignore_progress(_: Sequence[Trace]) -> None:
    """For those who do not want to know where ranks are."""


def never_stop() -> bool:
    """For those who do not want to stop early."""
    return False


def run_group(
    job: Job,
    launcher: Launcher,
    *,
    on_progress: Callable[[Sequence[Trace]], None] = ignore_progress,
    stop: Callable[[], bool] = never_stop,
) -> Outcome:
    """Run a job to its end, good or bad, and judge it. No process of it is left afterwards.

    `on_move` is called whenever a rank moved; `stop` is asked several times a second whether to give up.

    Raises:
        BenchboxError: a process of the group cannot be ended.
    """
    job.prepare()
    group = launcher.start(job)
    try:
        ending = watch(job, group, on_progress, stop)
        stacks = ask_for_stacks(job, group, ending.traces) if ending.cause in ("hang", "timeout") else {}
    except RecordError as problem:
        return unreadable_events(problem)
    finally:
        group.end()
        job.tidy()
    return classify_outcome(ending, group.failures(), stacks=stacks, group_said=_tail(job.group_log))


def _tail(path: Path) -> str:
    """The end of a log, for people."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
