"""Comparison of the collectives that the ranks of a stuck or failed group called last.

Ranks that agree call the same collectives in the same order, so that the n-th call of a group is the same on all of them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from benchbox.store.rank_collectives import RankCollectives, read_rank_collectives

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.launch.job import Job
    from benchbox.launch.supervise.outcome import Outcome
    from benchbox.launch.supervise.trace import Trace
    from benchbox.registry.launch_record import CollectiveCall, RankPosition

# Of these, ranks may legitimately have inputs of different shapes.
_UNEVEN = frozenset({"gather", "scatter", "all_to_all", "all_to_all_single", "alltoall", "alltoall_base", "barrier"})
_STUCK = ("hang", "timeout")


def add_positions(outcome: Outcome, job: Job, traces: Sequence[Trace], stacks: Mapping[int, str]) -> Outcome:
    """Add where every rank stood to the error of a stuck group, and make it a `desync` if their collectives differ.

    A crash becomes one as well: gloo raises an error where the sizes of a collective differ between ranks.
    """
    error = outcome.error
    if error is None or outcome.status not in (*_STUCK, "crash") or error["type"] in ("Killed", "LaunchError", "Terminated"):
        return outcome
    collectives = {trace.rank: read_rank_collectives(job.collectives(trace.rank)) for trace in traces}
    calls = {rank: written["calls"] for rank, written in collectives.items() if written and written["calls"]}
    difference = find_difference(calls)
    if difference is None and outcome.status not in _STUCK:
        return outcome
    positions = [_position(trace, collectives[trace.rank], stacks.get(trace.rank)) for trace in traces]
    if difference is None:
        return replace(outcome, error={**error, "ranks": positions})
    message = f"ranks called different collectives: {difference}"
    if outcome.status == "crash":
        message += f"; then: {error['message']}"
    tracebacks = "\n".join(f"rank {position['rank']}\n{position['stack']}" for position in positions if position["stack"])
    changes: Any = {"type": "DesyncError", "message": message, "rank": None, "phase": None, "ranks": positions}
    changes["traceback"] = tracebacks or None
    return replace(outcome, status="desync", error={**error, **changes})


def find_difference(calls: Mapping[int, Sequence[CollectiveCall]]) -> str | None:
    """Return how two ranks contradict each other, or None when one of them may only be behind.

    Args:
        calls: the last calls of each rank, oldest first.
    """
    for first, second in combinations(sorted(calls), 2):
        for waiting, other in ((first, second), (second, first)):
            current = current_call(calls[waiting]) or calls[waiting][-1]
            same_number = next((call for call in calls[other] if _number(call) == _number(current)), None)
            if same_number is not None and _content(same_number) != _content(current):
                texts = {waiting: describe_call(current), other: describe_call(same_number)}
                number = f"call {current['sequence']} of group {current['group']}"
                return f"{number} is {texts[first]} on rank {first} and {texts[second]} on rank {second}"
        one, two = (current_call(calls[rank]) for rank in (first, second))
        if one and two and one["group"] != two["group"] and second in (one["ranks"] or ()) and first in (two["ranks"] or ()):
            texts = {first: describe_call(one), second: describe_call(two)}
            return " and ".join(f"rank {rank} waits in {texts[rank]}" for rank in (first, second))
    return None


def current_call(calls: Sequence[CollectiveCall]) -> CollectiveCall | None:
    """Return the first call that is not done, in which the rank waits, or None."""
    return next((call for call in calls if not call["is_done"]), None)


def describe_call(call: CollectiveCall) -> str:
    """Return operation, inputs and group, such as `all_reduce(float32 [72]) in group default_pg 0`."""
    inputs = ", ".join(f"{dtype} {shape}" for dtype, shape in zip(call["dtypes"], call["shapes"], strict=False))
    return f"{call['operation']}({inputs})"


def _number(call: CollectiveCall) -> tuple[str, int]:
    return call["group"], call["sequence"]


def _content(call: CollectiveCall) -> tuple[Any, ...]:
    if call["operation"] in _UNEVEN:
        return (call["operation"],)
    return call["operation"], call["dtypes"], call["shapes"]


def _position(trace: Trace, written: RankCollectives | None, dump: str | None) -> RankPosition:
    state = trace.state
    if written is None:
        reason = "on another node" if trace.remote else "the rank had ended" if trace.final_event else "the rank did not answer"
    calls = written["calls"] if written else []
    return {
        "rank": trace.rank,
        "stage": state.stage if state else None,
        "step": state.step if state else None,
        "phase": state.phase if state else None,
        "collective": current_call(calls),
        "last_collectives": list(calls),
        "stack": written["stack"] if written else dump,
        "reason": written["reason"] if written else reason,
    }
