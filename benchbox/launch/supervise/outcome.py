"""From how a group ended to the status of its launch: typed by what ranks said as structures, never by what a log says."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.launch.supervise.root_cause import find_root_cause, stopped_reporting
from benchbox.registry.statuses import STATUSES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.errors import RecordError
    from benchbox.launch.job import RankExit
    from benchbox.launch.supervise.trace import Trace
    from benchbox.launch.supervise.watch import GroupEnding
    from benchbox.registry.phases import RankState

# torchrun kills ranks itself, but only those that ignore its SIGTERM for 30 s. An earlier SIGKILL comes from outside.
_OWN_KILLS_AFTER_S = 15.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Status and error of a launch, as they go into its record."""

    status: str
    error: dict[str, Any] | None = None


def classify_outcome(
    ending: GroupEnding, failures: Sequence[RankExit] = (), *, stacks: Mapping[int, str] | None = None, group_said: str = ""
) -> Outcome:
    """The outcome of a group, from how it ended and the ranks that failed, first noticed first.

    The first of these that holds: the user stopped it; no rank started; a rank was killed from outside; a rank failed on its
    own account (the earliest); the group had to be ended because it stood still or took too long; a rank vanished without a
    word; a rank failed because another had; the group failed although every rank was done. Else it is ok. For people only are
    `stacks`, by rank, where they could be had, and `group_said`, which becomes the message when there is no other.
    """
    if ending.cause == "stopped":
        return Outcome("interrupted", _error("Interrupted", "stopped by the user before it ended"))
    if ending.cause == "ended" and not any(trace.pid is not None for trace in ending.traces):
        return _crash("LaunchError", f"no rank started: {group_said or 'the group said nothing'}")
    noticed = failures if ending.cause == "ended" else ()  # else they failed because the launcher ended them
    errors = sorted((error for trace in ending.traces for error in trace.errors), key=lambda error: error["t"])
    own = [error for error in errors if not error.get("secondary")]
    if killed := _killed(ending.traces, noticed):
        return killed
    if own:
        return _said(own[0])
    if ending.cause in ("hang", "timeout"):
        return _stuck(ending, stacks or {})
    if vanished := _vanished(ending, noticed):
        return vanished
    if errors:
        return _said(errors[0])
    if ending.exit_code:
        return _failed_exit(ending, noticed)
    return Outcome("ok")


def unreadable_events(problem: RecordError) -> Outcome:
    """The outcome of a group whose ranks wrote something that is no event."""
    return _crash("RecordError", str(problem))


def _killed(traces: Sequence[Trace], noticed: Sequence[RankExit]) -> Outcome | None:
    first = min((failed.noticed_at for failed in noticed), default=0.0)
    for failed in noticed:
        trace = traces[failed.rank]
        early = failed.noticed_at - first < _OWN_KILLS_AFTER_S
        if failed.code == -signal.SIGKILL and early and trace.ended is None:
            message = "ended by SIGKILL from outside, as the host does when it is out of memory"
            return _crash("Killed", message, trace.rank, trace.state)
    return None


def _stuck(ending: GroupEnding, stacks: Mapping[int, str]) -> Outcome:
    found = find_root_cause(ending.traces, ending.at)
    if ending.cause == "hang":
        error = _error("Hang", f"no rank made progress: {found.sentence}", found.rank, found.state)
    else:
        error = _error("Timeout", f"the launch took too long: {found.sentence}", found.rank, found.state)
    seen = [rank for rank in stacks if found.rank in (None, rank)]
    error["traceback"] = "\n".join(f"rank {rank}\n{stacks[rank]}" for rank in seen) or None
    return Outcome(ending.cause, error)


def _vanished(ending: GroupEnding, noticed: Sequence[RankExit]) -> Outcome | None:
    missing = [trace for trace in ending.traces if trace.ended is None]
    if ending.cause == "failing":  # the ranks still alive were ended by the launcher: only a dead one has vanished
        missing = [trace for trace in missing if stopped_reporting(trace, ending.at)]
    if not missing:
        return None
    codes = {failed.rank: failed.code for failed in noticed}
    known = [trace for rank in codes for trace in missing if trace.rank == rank]
    first = known[0] if known else min(missing, key=lambda trace: trace.last_seen or 0.0)
    code = codes.get(first.rank)
    kind = "ExitError" if code is not None and code > 0 else "Killed"
    return _crash(kind, f"ended {_how(code)} without a word", first.rank, first.state)


def _failed_exit(ending: GroupEnding, noticed: Sequence[RankExit]) -> Outcome:
    told = next((trace for trace in ending.traces if trace.ended == "terminated"), None)
    if told is not None:
        return _crash("Terminated", "told by SIGTERM from outside to stop", told.rank, told.state)
    if noticed:
        return _crash("ExitError", f"ended {_how(noticed[0].code)} after it was done", noticed[0].rank)
    return _crash("ExitError", f"the group ended with exit code {ending.exit_code} after every rank was done")


def _how(code: int | None) -> str:
    if code is None:
        return "for an unknown reason"
    if code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _said(event: Mapping[str, Any]) -> Outcome:
    status = event["status"] if event.get("status") in STATUSES else "crash"
    keys = ("type", "message", "rank", "phase", "traceback", "stage", "step")
    return Outcome(status, {key: event.get(key) for key in keys})


def _crash(kind: str, message: str, rank: int | None = None, state: RankState | None = None) -> Outcome:
    return Outcome("crash", _error(kind, message, rank, state))


def _error(kind: str, message: str, rank: int | None = None, state: RankState | None = None) -> dict[str, Any]:
    return {
        "type": kind,
        "message": message,
        "rank": rank,
        "phase": state.phase if state else None,
        "traceback": None,
        "stage": state.stage if state else None,
        "step": state.step if state else None,
    }
