"""Supervision of a job from the start of its processes to the end of the last of them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from benchbox.errors import MAKE_ROOM, RecordError
from benchbox.launch.supervise.desync import add_positions
from benchbox.launch.supervise.outcome import classify_outcome, unreadable_events
from benchbox.launch.supervise.stacks import collect_stacks, shorten_files
from benchbox.launch.supervise.watch import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchbox.launch.job import Job, Launcher
    from benchbox.launch.supervise.outcome import Outcome
    from benchbox.launch.supervise.trace import Trace
    from benchbox.registry.launch_record import ErrorRecord

_TAIL_BYTES = 2000
_FULL_BYTES = 1 << 16


def ignore_progress(_: Sequence[Trace]) -> None:
    """Do nothing: the default `on_progress`."""


def never_stop() -> bool:
    """Return False: the default `stop` and `ask`."""
    return False


def run_group(
    job: Job,
    launcher: Launcher,
    *,
    on_progress: Callable[[Sequence[Trace]], None] = ignore_progress,
    stop: Callable[[], bool] = never_stop,
    ask: Callable[[], bool] = never_stop,
) -> Outcome:
    """Run a job to its end and classify how it ended. No process of it is left afterwards.

    Args:
        job: the job; its folder is emptied first.
        launcher: starts the ranks.
        on_progress: called with the traces of all ranks whenever one of them progressed.
        stop: polled several times a second; once true, the group is ended.
        ask: polled likewise; once true, every rank gets SIGUSR1, on which a training saves and ends.

    Raises:
        BenchboxError: a process of the group cannot be ended.
    """
    job.prepare()
    group = launcher.start(job)
    try:
        ending = watch(job, group, on_progress, stop, ask)
        stacks = collect_stacks(job, group, ending.traces) if ending.cause in ("hang", "timeout") else {}
    except RecordError as problem:
        return unreadable_events(problem)
    finally:
        group.end()
        job.remove_empty_stacks()
    outcome = classify_outcome(
        ending, group.failures(), stacks=stacks, lost_node=group.lost_node(), log_tail=_read_tail(job.group_log)
    )
    outcome = add_positions(outcome, job, ending.traces, stacks)
    return _shorten_tracebacks(_name_node(_name_full_disk(outcome, job), job))


def _name_full_disk(outcome: Outcome, job: Job) -> Outcome:
    """Say that the disk of the job is full, if it is: a rank may then have been unable to report any error."""
    error = outcome.error
    if error is None or outcome.status != "crash" or shutil.disk_usage(job.folder).free > _FULL_BYTES:
        return outcome
    cause = error["message"].removesuffix(f"; {MAKE_ROOM}")  # of a checkpoint that could not be written
    message = f"{cause}; the disk of {job.folder} is full: {MAKE_ROOM}"
    return replace(outcome, error={**error, "message": message})


def _name_node(outcome: Outcome, job: Job) -> Outcome:
    """Add the node of the rank at fault to the error of a launch on several nodes."""
    error = outcome.error
    if error is None or error["rank"] is None or job.nnodes == 1:
        return outcome
    return replace(outcome, error={**error, "message": f"{error['message']} (on node {job.node_of(error['rank'])})"})


def _shorten_tracebacks(outcome: Outcome) -> Outcome:
    if outcome.error is None:
        return outcome
    error: ErrorRecord = {**outcome.error, "traceback": shorten_files(outcome.error["traceback"])}
    if positions := error.get("ranks"):
        error["ranks"] = [{**position, "stack": shorten_files(position["stack"])} for position in positions]
    return replace(outcome, error=error)


def _read_tail(path: Path) -> str:
    """Return the last lines of a log, or an empty string where there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
