"""Watching a group: follows the events of its ranks until it ends, or has to be ended."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchbox.launch.supervise.trace import Trace
from benchbox.store.events import read_events
from benchbox.store.rank_state import read_rank_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchbox.launch.job import Job, RankGroup

_POLL_S = 0.1

# Loading code and building billions of parameters takes minutes in which nothing is seen to move: for the timeout to judge.
_OPAQUE_STAGES = ("build", "prepare")

# Once every rank has said its last word, processes get this long to go.
_EXIT_LIMIT_S = 60.0

# After a rank has said why it fails, the others get this long to fail too (their collectives break) before they are ended.
_FAILING_LIMIT_S = 15.0


# By itself, or it has to be ended, and why.
Cause = Literal["ended", "failing", "timeout", "hang", "stopped"]


@dataclass(frozen=True, slots=True)
class GroupEnding:
    """Why watching ended, and where every rank stood then."""

    cause: Cause
    traces: tuple[Trace, ...]
    exit_code: int | None  # of the group, when it ended by itself
    at: float  # unix time in seconds


def watch(job: Job, group: RankGroup, on_progress: Callable[[Sequence[Trace]], None], stop: Callable[[], bool]) -> GroupEnding:
    """Follow a group until it has ended or has to be ended, which is left to the caller.

    `on_move` is called with all traces whenever a rank moved; `stop` is asked whether the user wants to.

    Raises:
        RecordError: a rank wrote something that is no event.
    """
    traces = tuple(Trace(rank) for rank in range(job.ranks))
    cause, exit_code = _follow(job, group, traces, on_progress, stop)
    for trace in traces:
        # Events tell of steps at once, but of phases only once a second; this is where the rank really was.
        trace.state = read_rank_state(job.rank_state(trace.rank)) or trace.state
    return GroupEnding(cause, traces, exit_code, time.time())


def _follow(
    job: Job,
    group: RankGroup,
    traces: Sequence[Trace],
    on_progress: Callable[[Sequence[Trace]], None],
    stop: Callable[[], bool],
) -> tuple[Cause, int | None]:
    offsets = [0] * len(traces)
    began = moved = time.monotonic()
    failing_since: float | None = None
    while True:
        exit_code = group.poll()  # before reading, so that whatever was written until the end is read
        now = time.monotonic()
        if _read(job, traces, offsets):
            moved = now
            on_progress(traces)
        if exit_code is not None:
            return "ended", exit_code
        if stop():
            return "stopped", None
        if failing_since is None and any(trace.errors for trace in traces):
            failing_since = now
        if failing_since is not None:
            if now - failing_since > _FAILING_LIMIT_S:
                return "failing", None
        elif job.timeout_s is not None and now - began > job.timeout_s:
            return "timeout", None
        elif now - moved > _patience_s(job, traces):
            return "hang", None
        time.sleep(_POLL_S)


def _patience_s(job: Job, traces: Sequence[Trace]) -> float:
    """How long all ranks may stand still, as they stand now."""
    if all(trace.ended for trace in traces):
        return _EXIT_LIMIT_S
    if all(trace.state is None or trace.state.stage in _OPAQUE_STAGES for trace in traces):
        return math.inf
    return job.hang_after_s


def _read(job: Job, traces: Sequence[Trace], offsets: list[int]) -> bool:
    """Fold what is new in the event files; whether any rank moved."""
    moved = False
    for trace in traces:
        events, offsets[trace.rank] = read_events(job.events(trace.rank), offsets[trace.rank])
        for event in events:
            moved |= trace.fold(event)
    return moved
