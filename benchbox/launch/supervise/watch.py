"""Watching a group: following the events of its ranks until it ends or has to be ended."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import psutil

from benchbox.launch.supervise.trace import Trace
from benchbox.registry.phases import CHECKPOINT, CHECKPOINT_LIMIT_S, COMPILATION
from benchbox.store.events import read_events
from benchbox.store.rank_state import read_rank_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchbox.launch.job import Job, RankGroup

# Reading events takes a millisecond of a core that the ranks may need.
_POLL_S = 0.1

# Imports, compilation and billions of parameters to build take minutes without visible progress: only the timeout applies, and
# this limit to a training, which has none. A dataset on a server that does not answer would else hold its machines for days.
_OPAQUE_STAGES = ("build", "compile_extension", "prepare")
_OPAQUE_LIMIT_S = 3600.0

# Once every rank has written its final event, the processes get this long to exit.
_EXIT_LIMIT_S = 60.0

# After a rank has reported an error, the others get this long to fail as well (their collectives break) before they are ended.
_FAILING_LIMIT_S = 15.0


# `ended` by itself; for the other causes the group has to be ended.
Cause = Literal["ended", "failing", "timeout", "hang", "stopped"]


@dataclass(frozen=True, slots=True)
class GroupEnding:
    """Cause for which watching a group ended, and the traces of its ranks at that time."""

    cause: Cause
    traces: tuple[Trace, ...]
    exit_code: int | None  # of a group that ended by itself
    at: float  # seconds of the monotonic clock


def watch(
    job: Job,
    group: RankGroup,
    on_progress: Callable[[Sequence[Trace]], None],
    stop: Callable[[], bool],
    ask: Callable[[], bool],
) -> GroupEnding:
    """Follow a group until it has ended or has to be ended. Ending it is left to the caller.

    `on_progress`, `stop` and `ask` are those of `run_group`.

    Raises:
        RecordError: an event file cannot be parsed.
    """
    traces = tuple(Trace(rank, remote=job.node_of(rank) != job.node) for rank in range(job.ranks))
    cause, exit_code = _follow(job, group, traces, on_progress, stop, ask)
    for trace in traces:
        # Events report steps at once but phases only once a second; the state file is exact.
        trace.restate(read_rank_state(job.rank_state(trace.rank)))
    return GroupEnding(cause, traces, exit_code, time.monotonic())


def _follow(
    job: Job,
    group: RankGroup,
    traces: Sequence[Trace],
    on_progress: Callable[[Sequence[Trace]], None],
    stop: Callable[[], bool],
    ask: Callable[[], bool],
) -> tuple[Cause, int | None]:
    offsets = [0] * len(traces)
    start = last_progress = time.monotonic()
    failing_since: float | None = None
    has_asked = False
    timeout_s = 0.0  # a stop that was asked for before is noticed at once
    while True:
        exit_code = group.poll(timeout_s)  # before reading, so that everything written until the end is read
        timeout_s = _POLL_S
        now = time.monotonic()
        if _read_new_events(job, traces, offsets):
            last_progress = now
            on_progress(traces)
        if exit_code is not None:
            # A batch system signals this process and all ranks together, so the group may end before it is asked to.
            return ("stopped", None) if exit_code and stop() else ("ended", exit_code)
        if stop():
            return "stopped", None
        if not has_asked and ask():
            has_asked = True
            group.signal_ranks([trace.pid for trace in traces if trace.pid is not None and not trace.remote], signal.SIGUSR1)
        if failing_since is None and any(trace.errors for trace in traces):
            failing_since = now
        if failing_since is not None:
            if now - failing_since > _FAILING_LIMIT_S:
                return "failing", None
        elif job.timeout_s is not None and now - start > job.timeout_s:
            return "timeout", None
        elif now - last_progress > _hang_limit_s(job, traces):
            if not any(_has_disappeared(trace) for trace in traces):
                return "hang", None
            failing_since = now  # the launcher is about to notice, and knows how the rank ended


def _has_disappeared(trace: Trace) -> bool:
    """Return whether the process of a rank has ended without a final event, as one that was killed does."""
    if trace.pid is None or trace.final_event is not None or trace.remote:
        return False
    try:
        return bool(psutil.Process(trace.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _hang_limit_s(job: Job, traces: Sequence[Trace]) -> float:
    """Return the number of seconds that the ranks may make no progress in their present states."""
    if all(trace.final_event for trace in traces):
        return _EXIT_LIMIT_S
    opaque_limit_s = math.inf if job.timeout_s is not None else max(_OPAQUE_LIMIT_S, job.hang_after_s)
    # The others may wait for the collective of a rank that still prepares or compiles.
    unfinished = [trace.state for trace in traces if not trace.final_event]
    if any(state is None or state.stage in _OPAQUE_STAGES or state.phase == COMPILATION for state in unfinished):
        return opaque_limit_s
    if any(trace.state is not None and trace.state.stage == CHECKPOINT and not trace.final_event for trace in traces):
        return CHECKPOINT_LIMIT_S + job.hang_after_s  # the ranks themselves give up before
    return job.hang_after_s


def _read_new_events(job: Job, traces: Sequence[Trace], offsets: list[int]) -> bool:
    """Update the traces with new events and return whether any rank progressed."""
    progressed = False
    for trace in traces:
        events, offsets[trace.rank] = read_events(job.events(trace.rank), offsets[trace.rank])
        now = time.monotonic()
        for event in events:
            progressed |= trace.receive(event, now)
    return progressed
