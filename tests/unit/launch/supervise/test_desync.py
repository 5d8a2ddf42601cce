"""Collectives that contradict each other, and those of a rank that is only behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benchbox.launch.job import Job
from benchbox.launch.supervise.desync import add_positions, find_difference
from benchbox.launch.supervise.outcome import Outcome
from benchbox.launch.supervise.trace import Trace
from benchbox.store.files import write_json

if TYPE_CHECKING:
    from pathlib import Path


def call(sequence: int, operation: str = "all_reduce", shape: tuple[int, ...] = (72,), **changes: Any) -> Any:
    values = {"group": "default_pg 0", "ranks": [0, 1], "sequence": sequence, "operation": operation}
    return {**values, "dtypes": ["float32"], "shapes": [list(shape)], "is_done": False, **changes}


def done(sequence: int, operation: str = "all_reduce", **changes: Any) -> Any:
    return call(sequence, operation, is_done=True, **changes)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([done(1), call(2)], [done(1), call(2, "all_gather")], "call 2 of group default_pg 0 is all_reduce(float32 [72])"),
        ([done(1), call(2)], [done(1), call(2, shape=(1,)), call(3)], "all_reduce(float32 [1]) on rank 1"),
        ([done(1), call(2, "barrier")], [done(1), call(2)], "barrier(float32 [72]) on rank 0"),
        ([done(1), done(2)], [done(1), call(2, dtypes=["bfloat16"])], "all_reduce(bfloat16 [72]) on rank 1"),
        ([call(9, group="row")], [call(4, group="column")], "rank 0 waits in all_reduce(float32 [72]) and rank 1 waits in"),
        ([call(2), call(3)], [call(2, shape=(1,)), call(3)], "call 2 of group default_pg 0 is all_reduce(float32 [72])"),
    ],
    ids=[
        "operation",
        "size",
        "end of the loop",
        "failed call that torch has retired",
        "each in another group",
        "several at once",
    ],
)
def test_different_calls_are_named_with_both_ranks(first: list[Any], second: list[Any], words: str) -> None:
    difference = find_difference({0: first, 1: second})
    assert difference is not None
    assert words in difference


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([done(1), call(2)], [done(1)]),
        ([done(1), call(2), call(3)], [done(1), call(2)]),
        ([done(1), call(2, "scatter", shape=(4,))], [done(1), call(2, "scatter", shape=())]),
        ([call(9, group="row", ranks=[0, 2])], [call(4, group="column", ranks=[1, 3])]),
    ],
    ids=["behind", "several at once", "uneven by design", "groups without the other rank"],
)
def test_a_rank_that_is_behind_does_not_contradict(first: list[Any], second: list[Any]) -> None:
    assert find_difference({0: first, 1: second}) is None


@pytest.mark.parametrize(("kind", "status"), [("RuntimeError", "desync"), ("Killed", "crash"), ("Terminated", "crash")])
def test_ranks_that_another_process_ended_may_have_called_different_collectives(kind: str, status: str, tmp_path: Path) -> None:
    job = Job(config={}, ranks=2, folder=tmp_path, timeout_s=None, hang_after_s=1.0)
    for rank, operation in enumerate(("all_reduce", "all_gather")):
        write_json(job.collectives(rank), {"calls": [call(2, operation)], "stack": "in clip", "reason": None})
    error: Any = {"type": kind, "message": "it ended", "rank": 1, "phase": "clip", "traceback": None}
    assert add_positions(Outcome("crash", error), job, [Trace(0), Trace(1)], {}).status == status


def test_a_rank_without_collectives_says_why(tmp_path: Path) -> None:
    job = Job(config={}, ranks=3, folder=tmp_path, timeout_s=None, hang_after_s=1.0)
    error: Any = {"type": "HangError", "message": "no progress", "rank": None, "phase": None, "traceback": None}
    traces = [Trace(0), Trace(1, final_event="error"), Trace(2, remote=True, final_event="error")]
    outcome = add_positions(Outcome("hang", error), job, traces, {0: "in forward"})
    assert outcome.error is not None
    positions = [(position["rank"], position["reason"], position["stack"]) for position in outcome.error["ranks"]]
    assert positions == [
        (0, "the rank did not answer", "in forward"),
        (1, "the rank had ended", None),
        (2, "on another node", None),
    ]
