"""The clock of the host is set while a launch runs: order and durations are those of the monotonic clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from benchbox.launch.supervise.outcome import classify_outcome
from benchbox.launch.supervise.trace import Trace
from benchbox.launch.supervise.watch import GroupEnding
from benchbox.measure.phases import ProgressTracker
from benchbox.store.events import EventWriter, read_events
from benchbox.worker.reporting import describe_error

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    """Both clocks of a host; setting it moves only one of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.unix_s, self.monotonic_s = 2e9, 1000.0
        patch.setattr(time, "time", lambda: self.unix_s)
        patch.setattr(time, "monotonic", lambda: self.monotonic_s)

    def advance(self, seconds: float, *, jump: float = 0.0) -> None:
        self.monotonic_s += seconds
        self.unix_s += seconds + jump


def traces(folder: Path) -> tuple[Trace, ...]:
    ranks = tuple(Trace(rank) for rank in range(2))
    for trace in ranks:
        for event in read_events(folder / str(trace.rank))[0]:
            trace.update(event)
    return ranks


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_the_earlier_of_two_failures_is_the_cause_though_the_clock_was_set(
    jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        clock = Clock(patch)
        for rank in (1, 0):
            writer = EventWriter(tmp_path / str(rank), rank)
            writer.write("start", pid=rank + 1)
            writer.write("error", **describe_error(RuntimeError(f"rank {rank}"), ProgressTracker().state))
            clock.advance(1.0, jump=jump)
        outcome = classify_outcome(GroupEnding("ended", traces(tmp_path), 1, clock.monotonic_s))
    assert outcome.error is not None
    assert outcome.error["rank"] == 1


@pytest.mark.parametrize(("silent", "remark"), [(False, ""), (True, ", and had stopped sending heartbeats")])
@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_rank_that_reports_is_not_silent_and_its_wait_has_its_true_length(
    jump: float, silent: bool, remark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits in backward for rank 1, in forward for two minutes and silent for the last one or not."""
    with monkeypatch.context() as patch:
        clock = Clock(patch)
        writers = [EventWriter(tmp_path / str(rank), rank) for rank in range(2)]
        trackers = [ProgressTracker("measure") for _ in range(2)]
        steps = [tracker.phase(phase) for tracker, phase in zip(trackers, ("backward", "forward"), strict=True)]
        for step in steps:
            step.__enter__()
        for reporting in (2, 1 if silent else 2):
            clock.advance(60.0, jump=jump)
            for writer, tracker in list(zip(writers, trackers, strict=True))[:reporting]:
                writer.write("heartbeat", **tracker.state._asdict())
        outcome = classify_outcome(GroupEnding("hang", traces(tmp_path), None, clock.monotonic_s))
    assert outcome.error is not None
    location = "rank 1 was in measure, forward for 120 s, the furthest behind"
    assert outcome.error["message"] == f"no rank made progress: {location}{remark}"
