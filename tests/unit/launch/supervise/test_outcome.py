"""Classification of an ended group, given by the events of its ranks."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchbox.launch.job import Job, RankExit
from benchbox.launch.supervise.group import _name_full_disk, _name_node
from benchbox.launch.supervise.outcome import classify_outcome
from benchbox.launch.supervise.trace import Trace
from benchbox.launch.supervise.watch import GroupEnding

NOW = 1000.0


def progress(step: int | None, phase: str | None, *, stage: str = "measure", t: float = NOW) -> dict[str, Any]:
    return {"monotonic_s": t, "event": "progress", "stage": stage, "step": step, "of": 10, "phase": phase}


def error(*, t: float = NOW, secondary: bool = False, status: str = "crash", rank: int = 0) -> dict[str, Any]:
    fields = {"type": "SomeError", "message": "said so", "phase": "clip", "stage": "measure", "step": 3, "traceback": "..."}
    return {"monotonic_s": t, "rank": rank, "event": "error", "status": status, "secondary": secondary, **fields}


DONE = {"monotonic_s": NOW, "event": "done"}
TERMINATED = {"monotonic_s": NOW, "event": "terminated", "signal": 15}


def ending(cause: str, *ranks: list[Mapping[str, Any]], exit_code: int | None = None) -> GroupEnding:
    traces = tuple(Trace(rank) for rank in range(len(ranks)))
    for trace, events in zip(traces, ranks, strict=True):
        trace.pid = trace.rank + 100 if events else None
        for event in events:
            trace.update(event)
    return GroupEnding(cause, traces, exit_code, NOW)


def test_all_done_and_exit_0_is_ok() -> None:
    assert classify_outcome(ending("ended", [DONE], [DONE], exit_code=0)).status == "ok"


def test_the_earliest_own_failure_is_what_happened() -> None:
    ranks = [error(t=2.0, rank=0, status="nan")], [error(t=1.0, rank=1, status="oom")], [error(t=0.5, rank=2, secondary=True)]
    outcome = classify_outcome(ending("ended", *ranks, exit_code=1))
    assert outcome.status == "oom"
    assert outcome.error["rank"] == 1
    assert (outcome.error["stage"], outcome.error["step"], outcome.error["phase"]) == ("measure", 3, "clip")


def test_an_unknown_status_is_a_crash() -> None:
    assert classify_outcome(ending("ended", [error(status="exploded")], exit_code=1)).status == "crash"


def test_a_rank_that_disappeared_is_blamed_before_those_that_failed_because_of_it() -> None:
    outcome = classify_outcome(ending("ended", [error(secondary=True)], [progress(4, "backward")], exit_code=1))
    assert (outcome.status, outcome.error["type"], outcome.error["rank"]) == ("crash", "Killed", 1)
    assert outcome.error["phase"] == "backward"


def test_a_rank_killed_from_outside_is_blamed_though_another_believes_it_failed_by_itself() -> None:
    failures = [RankExit(0, 1, 100.0), RankExit(1, -9, 100.0)]
    outcome = classify_outcome(ending("ended", [error(rank=0)], [progress(4, "backward")], exit_code=1), failures)
    assert (outcome.error["type"], outcome.error["rank"], outcome.error["phase"]) == ("Killed", 1, "backward")


def test_a_survivor_that_torchrun_had_to_kill_is_not_blamed_for_it() -> None:
    failures = [RankExit(0, 1, 100.0), RankExit(1, -9, 130.0)]
    outcome = classify_outcome(ending("ended", [error(rank=0)], [progress(4, "backward")], exit_code=1), failures)
    assert (outcome.error["type"], outcome.error["rank"]) == ("SomeError", 0)


@pytest.mark.parametrize("code", [-15, 143])
def test_a_rank_that_was_ended_with_its_group_is_not_blamed_for_it(code: int) -> None:
    """Nodes report their failures in their own order."""
    ranks = [progress(4, "backward")], [progress(4, "backward")]
    failures = [RankExit(0, code, 100.0), RankExit(1, 3, 99.0)]
    assert classify_outcome(ending("ended", *ranks, exit_code=1), failures).error["rank"] == 1


def test_of_two_ranks_that_disappeared_the_one_noticed_first_is_blamed() -> None:
    failures = [RankExit(1, -11, 100.0), RankExit(0, -9, 130.0)]
    outcome = classify_outcome(ending("ended", [progress(2, "forward")], [progress(2, "forward")], exit_code=1), failures)
    assert outcome.error["rank"] == 1
    assert "SIGSEGV" in outcome.error["message"]


def test_secondary_failures_alone_still_make_a_crash() -> None:
    outcome = classify_outcome(ending("ended", [error(secondary=True)], [TERMINATED], exit_code=1))
    assert (outcome.status, outcome.error["type"]) == ("crash", "SomeError")


def test_a_group_that_fails_after_all_were_done_is_not_ok() -> None:
    outcome = classify_outcome(ending("ended", [DONE], [DONE], exit_code=1), [RankExit(1, -6, 100.0)])
    assert (outcome.status, outcome.error["type"], outcome.error["rank"]) == ("crash", "ExitError", 1)
    assert "SIGABRT" in outcome.error["message"]


def test_ranks_terminated_by_another_process_are_a_crash() -> None:
    outcome = classify_outcome(ending("ended", [TERMINATED], [TERMINATED], exit_code=1))
    assert (outcome.status, outcome.error["type"]) == ("crash", "Terminated")


def test_an_error_of_the_one_rank_that_started_is_what_happened() -> None:
    outcome = classify_outcome(ending("ended", [error(status="oom")], [], exit_code=1), log_tail="a rendezvous failed")
    assert (outcome.status, outcome.error["type"]) == ("oom", "SomeError")


def test_when_no_rank_started_the_message_is_the_end_of_the_log() -> None:
    outcome = classify_outcome(ending("ended", [], [], exit_code=1), log_tail="No module named benchbox")
    assert (outcome.status, outcome.error["type"]) == ("crash", "LaunchError")
    assert "No module named benchbox" in outcome.error["message"]


@pytest.mark.parametrize(
    "ranks",
    [
        ([progress(2, "forward")], [progress(3, "forward")]),
        ([error(secondary=True)], [progress(3, "forward")]),
        ([], []),
    ],
    ids=["at work", "collective broke", "not started"],
)
def test_a_launcher_that_was_killed_is_the_cause_and_no_rank(ranks: Any) -> None:
    """Its ranks end with it, the one at the earliest step first or last."""
    outcome = classify_outcome(ending("ended", *ranks, exit_code=-9))
    assert (outcome.status, outcome.error["type"], outcome.error["rank"]) == ("crash", "Killed", None)
    assert outcome.error["message"] == "the launcher was ended by SIGKILL, and its ranks with it: no rank is at fault"


def test_ranks_that_are_ended_after_their_launcher_was_killed_are_not_at_fault() -> None:
    failures = [RankExit(rank=1, code=143, noticed_at=1.0), RankExit(rank=0, code=-15, noticed_at=1.0)]
    outcome = classify_outcome(ending("ended", [TERMINATED], [progress(2, "forward")], exit_code=-9), failures)
    assert (outcome.error["type"], outcome.error["rank"]) == ("Killed", None)
    assert "the launcher was ended by SIGKILL" in outcome.error["message"]


def test_a_launcher_that_died_after_a_rank_had_failed_is_not_the_cause() -> None:
    assert classify_outcome(ending("ended", [error(status="oom")], [progress(3, "sync")], exit_code=-9)).status == "oom"
    stuck = ending("ended", [progress(2, "sync")], [progress(2, "sync")], exit_code=-9)
    assert classify_outcome(stuck, [RankExit(1, -9, 100.0)]).error["rank"] == 1
    disappeared = classify_outcome(stuck, [RankExit(1, 3, 100.0)])
    assert (disappeared.error["rank"], disappeared.error["message"]) == (1, "ended with exit code 3 without reporting an error")


@pytest.mark.parametrize("cause", ["hang", "timeout"])
def test_a_stuck_group_waits_for_the_rank_furthest_behind(cause: str) -> None:
    ranks = [progress(4, "backward")], [progress(4, "forward", t=NOW - 30)], [progress(4, "clip")]
    outcome = classify_outcome(ending(cause, *ranks))
    assert (outcome.status, outcome.error["rank"]) == (cause, 1)
    assert (outcome.error["stage"], outcome.error["step"], outcome.error["phase"]) == ("measure", 4, "forward")


@pytest.mark.parametrize("cause", ["hang", "timeout"])
def test_how_ranks_end_that_the_launcher_ended_is_no_failure_of_theirs(cause: str) -> None:
    """A rank in a collective does not react to SIGTERM and is killed."""
    failures = [RankExit(0, -15, 100.0), RankExit(1, -9, 101.0)]
    outcome = classify_outcome(ending(cause, [progress(4, "forward")], [progress(4, "sync")]), failures)
    assert (outcome.status, outcome.error["rank"]) == (cause, 0)


def test_an_earlier_step_is_further_behind_than_an_earlier_phase_and_a_stage_than_both() -> None:
    assert classify_outcome(ending("hang", [progress(5, "forward")], [progress(4, "sync")])).error["rank"] == 1
    assert classify_outcome(ending("hang", [progress(1, "forward")], [progress(9, "sync", stage="warmup")])).error["rank"] == 1


def test_a_rank_without_heartbeats_is_blamed_whatever_its_last_state() -> None:
    """In a gather of parameters all ranks are in the same phase; only the stopped one sends no heartbeats."""
    alive = [progress(4, "forward", t=NOW - 60), {**progress(4, "forward"), "event": "heartbeat"}]
    outcome = classify_outcome(ending("hang", alive, [progress(4, "forward", t=NOW - 60)]))
    assert outcome.error["rank"] == 1
    assert "for 60 s" in outcome.error["message"]


def test_no_rank_is_blamed_when_several_are_equally_far_behind() -> None:
    outcome = classify_outcome(ending("hang", [progress(4, "forward")], [progress(4, "forward")]))
    assert (outcome.error["rank"], outcome.error["phase"]) == (None, "forward")
    assert "unknown" in outcome.error["message"]


def test_a_hang_after_every_rank_was_done_says_so() -> None:
    assert "every rank was done" in classify_outcome(ending("hang", [DONE], [DONE])).error["message"]


def test_a_failure_that_leaves_the_group_stuck_is_that_failure_and_no_hang() -> None:
    outcome = classify_outcome(ending("failing", [progress(4, "backward")], [error(rank=1, status="oom")]))
    assert (outcome.status, outcome.error["rank"]) == ("oom", 1)


def test_in_a_failing_group_a_dead_rank_is_distinguished_from_one_that_waits() -> None:
    ranks = [error(secondary=True)], [progress(4, "forward")], [progress(4, "forward", t=NOW - 16)]
    outcome = classify_outcome(ending("failing", *ranks))
    assert (outcome.error["type"], outcome.error["rank"]) == ("Killed", 2)


def test_in_a_failing_group_a_rank_that_only_waits_is_not_blamed() -> None:
    outcome = classify_outcome(ending("failing", [error(secondary=True)], [progress(4, "forward")]))
    assert (outcome.error["type"], outcome.error["rank"]) == ("SomeError", 0)


@pytest.mark.parametrize(
    ("ranks", "traceback"),
    [
        (([progress(4, "forward")], [progress(4, "forward")]), "rank 0\nin a\nrank 1\nin b"),
        (([progress(4, "sync")], [progress(4, "forward")]), "rank 1\nin b"),
    ],
    ids=["none is to blame", "one is to blame"],
)
def test_the_stacks_of_a_stuck_group_are_those_of_the_rank_to_blame_or_else_of_all(ranks: Any, traceback: str) -> None:
    assert classify_outcome(ending("hang", *ranks), stacks={0: "in a", 1: "in b"}).error["traceback"] == traceback


def test_a_group_that_the_user_stopped_is_interrupted_whatever_its_ranks_reported() -> None:
    assert classify_outcome(ending("stopped", [error()], [])).status == "interrupted"


def test_an_error_of_several_nodes_names_that_of_its_rank() -> None:
    """The last two of four ranks are on node 1 of two."""
    outcome = classify_outcome(ending("ended", [error(rank=2)], exit_code=1))
    job = Job(config={}, ranks=4, folder=Path(), timeout_s=None, hang_after_s=1.0, nnodes=2)
    assert _name_node(outcome, job).error["message"] == "said so (on node 1)"
    assert _name_node(outcome, replace(job, nnodes=1)) == outcome
    of_no_rank = classify_outcome(ending("ended", [DONE], exit_code=1))
    assert _name_node(of_no_rank, job) == of_no_rank
    ok = classify_outcome(ending("ended", [DONE], exit_code=0))
    assert _name_node(ok, job) == ok


def test_a_crash_beside_a_full_disk_says_so() -> None:
    """A rank may have been unable to report its error there. /proc has no room."""
    crash = classify_outcome(ending("ended", [progress(4, "backward")], exit_code=1))
    job = Job(config={}, ranks=1, folder=Path("/proc"), timeout_s=None, hang_after_s=1.0)
    message = crash.error["message"]
    assert (
        _name_full_disk(crash, job).error["message"] == f"{message}; the disk of /proc is full: make room, or write elsewhere"
    )
    with_remedy = replace(crash, error=crash.error | {"message": f"{message}; make room, or write elsewhere"})
    assert _name_full_disk(with_remedy, job) == _name_full_disk(crash, job), "the remedy is there once"
    assert _name_full_disk(crash, replace(job, folder=Path(__file__).parent)) == crash
