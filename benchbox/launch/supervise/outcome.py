"""Status of an ended group, from the structured events of its ranks and from exit codes, never from the text of a log."""

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
    from benchbox.registry.launch_record import ErrorRecord
    from benchbox.registry.phases import RankState

# torchrun kills ranks itself, but only those that ignore its SIGTERM for 30 s. An earlier SIGKILL comes from elsewhere.
_TORCHRUN_KILLS_AFTER_S = 15.0
_ENDED_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Status and error of a launch, as they go into its record."""

    status: str
    error: ErrorRecord | None = None


def classify_outcome(
    ending: GroupEnding,
    failures: Sequence[RankExit] = (),
    *,
    stacks: Mapping[int, str] | None = None,
    lost_node: str | None = None,
    log_tail: str = "",
) -> Outcome:
    """Classify how a group ended. The first that applies:

    1. the user stopped it
    2. no rank started
    3. a rank was killed by another process
    4. a rank failed, and not because another had: the earliest such failure
    5. the launcher of the ranks was killed, and they ended with it
    6. the launcher ended the group, because it made no progress or exceeded the time limit
    7. a rank disappeared without reporting an error, of another node where a node was lost
    8. a node was lost that had ended its ranks
    9. a rank failed because another had
    10. the group failed although every rank was done
    11. the ranks stopped a training because they were asked to

    Otherwise it is ok.

    Args:
        ending: why watching ended, with the trace of every rank.
        failures: exits of failed ranks in the order they were noticed.
        stacks: stack dumps by rank, where the ranks wrote any.
        lost_node: a line about the node whose loss ended the group, see `RankGroup.lost_node`.
        log_tail: end of the group's log, used as the message of a group in which no rank started.
    """
    if ending.cause == "stopped":
        return Outcome("interrupted", _error("Interrupted", "stopped by the user before it ended"))
    if ending.cause == "ended" and not any(trace.pid is not None for trace in ending.traces):
        if _launcher_was_killed(ending, failures):
            return _killed_launcher(ending)
        return _crash("LaunchError", f"no rank started: {lost_node or log_tail or 'the log of the group is empty'}")
    failed_ranks = failures if ending.cause == "ended" else ()  # otherwise they failed because the launcher ended them
    error_events = sorted((event for trace in ending.traces for event in trace.errors), key=lambda event: event["monotonic_s"])
    primary_errors = [event for event in error_events if not event.get("secondary")]
    if killed := _killed_rank(ending.traces, failed_ranks):
        return killed
    if primary_errors:
        return _reported_error(primary_errors[0])
    if _launcher_was_killed(ending, failures):
        return _killed_launcher(ending)
    if ending.cause in ("hang", "timeout"):
        return _stuck_group(ending, stacks or {})
    if disappeared := _disappeared_rank(ending, failed_ranks, only_elsewhere=lost_node is not None):
        return disappeared
    if lost_node is not None:
        return _crash("NodeLostError", lost_node)
    if error_events:
        return _reported_error(error_events[0])
    if ending.exit_code:
        return _failed_exit(ending, failed_ranks)
    if (stopped := next((trace for trace in ending.traces if trace.stopped_after is not None), None)) is not None:
        return Outcome("interrupted", _error("Stopped", f"asked to stop, after step {stopped.stopped_after}"))
    return Outcome("ok")


def failure_text(status: str, error: ErrorRecord | None) -> str:
    """Return how a launch failed: its status, and rank, phase, type and message of the error."""
    assert error is not None, "every status but ok has an error"
    location = "" if error["rank"] is None else f" rank {error['rank']}"
    location += "" if error["phase"] is None else f" phase {error['phase']}"
    return f"{status}{location}: {error['type']}: {error['message']}"


def unreadable_events(problem: RecordError) -> Outcome:
    """Return the outcome of a group with an event file that cannot be parsed."""
    return _crash("RecordError", str(problem))


def _killed_rank(traces: Sequence[Trace], failed_ranks: Sequence[RankExit]) -> Outcome | None:
    first_noticed_at = min((failed.noticed_at for failed in failed_ranks), default=0.0)
    for failed in failed_ranks:
        trace = traces[failed.rank]
        before_torchrun_kills = failed.noticed_at - first_noticed_at < _TORCHRUN_KILLS_AFTER_S
        if failed.code == -signal.SIGKILL and before_torchrun_kills and trace.final_event is None:
            message = "ended by SIGKILL from outside, as the host does when it is out of memory"
            return _crash("Killed", message, trace.rank, trace.state)
    return None


def _launcher_was_killed(ending: GroupEnding, failures: Sequence[RankExit]) -> bool:
    """Return whether the process that started the ranks died of a signal: else it reports a rank that failed, and exits.

    It may still report ranks that got the SIGTERM after its death: a fork server closes its socket before it is gone.
    """
    ended_with_it = all(failed.code in _ENDED_BY_SIGTERM for failed in failures)
    return ending.cause == "ended" and ending.exit_code is not None and ending.exit_code < 0 and ended_with_it


def _killed_launcher(ending: GroupEnding) -> Outcome:
    assert ending.exit_code is not None
    phrase = _exit_phrase(ending.exit_code)
    return _crash("Killed", f"the launcher was ended {phrase}, and its ranks with it: no rank is at fault")


def _stuck_group(ending: GroupEnding, stacks: Mapping[int, str]) -> Outcome:
    cause = find_root_cause(ending.traces, ending.at)
    if ending.cause == "hang":
        error = _error("Hang", f"no rank made progress: {cause.explanation}", cause.rank, cause.state)
    else:
        error = _error("Timeout", f"the launch took too long: {cause.explanation}", cause.rank, cause.state)
    stack_ranks = [rank for rank in stacks if cause.rank in (None, rank)]
    error["traceback"] = "\n".join(f"rank {rank}\n{stacks[rank]}" for rank in stack_ranks) or None
    return Outcome(ending.cause, error)


def _disappeared_rank(ending: GroupEnding, failed_ranks: Sequence[RankExit], *, only_elsewhere: bool) -> Outcome | None:
    missing = [trace for trace in ending.traces if trace.final_event is None]
    if only_elsewhere:  # the launcher ended the ranks of this node
        missing = [trace for trace in missing if trace.remote]
    if ending.cause == "failing":  # the launcher ended the ranks that were alive: only those dead before count
        missing = [trace for trace in missing if stopped_reporting(trace, ending.at)]
    if not missing:
        return None
    codes = {failed.rank: failed.code for failed in failed_ranks}
    # A rank that SIGTERM ended, on another node, followed one that had failed.
    ranks = sorted(codes, key=lambda rank: codes[rank] in _ENDED_BY_SIGTERM)
    noticed = [trace for rank in ranks for trace in missing if trace.rank == rank]
    trace = noticed[0] if noticed else min(missing, key=lambda trace: trace.last_event_at or 0.0)
    code = codes.get(trace.rank)
    error_type = "ExitError" if code is not None and code > 0 else "Killed"
    return _crash(error_type, f"ended {_exit_phrase(code)} without reporting an error", trace.rank, trace.state)


def _failed_exit(ending: GroupEnding, failed_ranks: Sequence[RankExit]) -> Outcome:
    terminated = next((trace for trace in ending.traces if trace.final_event == "terminated"), None)
    if terminated is not None:
        return _crash("Terminated", "ended by SIGTERM from outside", terminated.rank, terminated.state)
    if failed_ranks:
        return _crash("ExitError", f"ended {_exit_phrase(failed_ranks[0].code)} after it was done", failed_ranks[0].rank)
    return _crash("ExitError", f"the group ended with exit code {ending.exit_code} after every rank was done")


def _exit_phrase(code: int | None) -> str:
    if code is None:
        return "for an unknown reason"
    if code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _reported_error(event: Mapping[str, Any]) -> Outcome:
    status = event["status"] if event.get("status") in STATUSES else "crash"
    error: ErrorRecord = {
        "type": event.get("type", "Error"),
        "message": event.get("message", ""),
        "rank": event.get("rank"),
        "phase": event.get("phase"),
        "traceback": event.get("traceback"),
        "stage": event.get("stage"),
        "step": event.get("step"),
        "operation": event.get("operation"),
    }
    return Outcome(status, error)


def _crash(error_type: str, message: str, rank: int | None = None, state: RankState | None = None) -> Outcome:
    return Outcome("crash", _error(error_type, message, rank, state))


def _error(error_type: str, message: str, rank: int | None = None, state: RankState | None = None) -> ErrorRecord:
    return {
        "type": error_type,
        "message": message,
        "rank": rank,
        "phase": state.phase if state else None,
        "traceback": None,
        "stage": state.stage if state else None,
        "step": state.step if state else None,
    }
