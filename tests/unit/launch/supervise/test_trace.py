"""State of a rank, reconstructed from its events."""

from __future__ import annotations

from typing import Any

import pytest

from benchbox.launch.supervise.trace import Trace
from benchbox.registry.phases import RankState


def event(kind: str, *, t: float = 1.0, **fields: Any) -> dict[str, Any]:
    return {"monotonic_s": t, "rank": 0, "event": kind, **fields}


def test_only_a_change_of_state_is_progress_and_heartbeats_count_as_signs_of_life() -> None:
    trace = Trace(0)
    state = {"stage": "measure", "step": 1, "of": 3, "phase": None}
    assert trace.update(event("progress", **state))
    assert not trace.update(event("heartbeat", t=2.0, **state, since=0.9))
    assert trace.last_event_at == 2.0
    assert trace.update(event("heartbeat", t=3.0, **{**state, "phase": "forward"}, since=2.5))
    assert trace.state == RankState("measure", 1, 3, "forward", 2.5)


def test_a_start_tells_the_process_id() -> None:
    trace = Trace(0)
    assert trace.update(event("start", pid=77))
    assert trace.pid == 77


def test_warnings_are_kept_and_shown_at_once() -> None:
    trace = Trace(0)
    assert trace.update(event("warning", message="a task is cut")), "as progress"
    assert trace.warnings == ["a task is cut"]


@pytest.mark.parametrize("kinds", [("terminated", "error"), ("error", "terminated"), ("done", "error")])
def test_the_first_final_event_counts(kinds: tuple[str, str]) -> None:
    trace = Trace(0)
    for kind in kinds:
        trace.update(event(kind))
    assert trace.final_event == kinds[0]
    assert len(trace.errors) == 1


@pytest.mark.parametrize("remote", [False, True])
def test_a_state_file_replaces_older_events_and_no_newer_ones(remote: bool) -> None:
    """NFS may show the memory of another machine late: the rank would be the furthest behind, and named for a hang of others.

    The second event arrives with less delay, after which the clock of the other machine is better known.
    """
    trace = Trace(0, remote=remote)
    state = {"stage": "train", "of": 9, "phase": "forward"}
    trace.receive(event("heartbeat", t=11.0, **state, step=4, since=10.5), 1016.0)
    trace.receive(event("heartbeat", t=12.0, **state, step=4, since=10.5), 1013.0)
    trace.restate(RankState("train", 3, 9, "backward", 10.25))
    assert trace.state is not None
    assert trace.state.step == 4
    trace.restate(RankState("train", 4, 9, "backward", 10.75))
    assert trace.state == RankState("train", 4, 9, "backward", 1011.75 if remote else 10.75)
