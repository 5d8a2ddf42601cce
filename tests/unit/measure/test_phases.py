from __future__ import annotations

import time

import pytest
import torch

from benchbox.measure import phases
from benchbox.measure.phases import NONE, PHASES, CombinedInstrument, PhaseClock, ProgressTracker


@pytest.fixture
def ticks(monkeypatch):
    """A host clock that a test advances by hand."""
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def run_step(instrument, ticks, micro_steps=1):
    with instrument.step():
        for _ in range(micro_steps):
            with instrument.phase("forward"):
                ticks(0.25)
            with instrument.phase("backward"):
                ticks(0.5)
        with instrument.phase("optimizer"):
            ticks(1.0)


def test_phases_that_occur_again_in_a_step_add_up(ticks):
    clock = PhaseClock(torch.device("cpu"))
    run_step(clock, ticks, micro_steps=4)
    run_step(clock, ticks, micro_steps=1)
    times = clock.drain()
    assert times.step_s == [4.0, 1.75]
    assert times.phases_s == {"forward": [1.0, 0.25], "backward": [2.0, 0.5], "optimizer": [1.0, 1.0]}


def test_phases_come_in_their_order_and_one_that_no_step_entered_is_absent(ticks):
    clock = PhaseClock(torch.device("cpu"))
    with clock.step():
        for name in reversed(PHASES):
            if name != "clip":
                with clock.phase(name):
                    ticks(1.0)
    assert list(clock.drain().phases_s) == [name for name in PHASES if name != "clip"]


def test_draining_removes_the_steps(ticks):
    clock = PhaseClock(torch.device("cpu"))
    run_step(clock, ticks)
    clock.drain()
    assert clock.drain().step_s == []


def test_a_step_that_failed_is_not_a_sample(ticks):
    clock = PhaseClock(torch.device("cpu"))
    with pytest.raises(RuntimeError), clock.step(), clock.phase("forward"):
        raise RuntimeError
    run_step(clock, ticks)
    times = clock.drain()
    assert times.step_s == [1.75]
    assert times.phases_s["forward"] == [0.25]


def test_an_unknown_phase_is_refused():
    with pytest.raises(KeyError):
        PhaseClock(torch.device("cpu")).phase("forwards")


def test_the_real_clock_measures_seconds():
    clock = PhaseClock(torch.device("cpu"))
    before = time.perf_counter()
    with clock.step(), clock.phase("sync"):
        time.sleep(0.01)
    most = time.perf_counter() - before
    times = clock.drain()
    assert 0.01 <= times.phases_s["sync"][0] <= times.step_s[0] <= most


def test_progress_tracker_numbers_steps_within_a_stage_and_names_the_phase():
    tracker = ProgressTracker()
    tracker.enter("measure", 2)
    assert tracker.state[:4] == ("measure", None, 2, None)
    with tracker.step():
        with tracker.phase("backward"):
            assert tracker.state[:4] == ("measure", 1, 2, "backward")
        assert tracker.state.phase is None
    with tracker.step():
        assert tracker.state.step == 2
    tracker.enter("probe")
    with tracker.step():
        assert tracker.state[:2] == ("probe", 1)


def test_progress_tracker_returns_to_the_step_in_which_a_stage_within_began():
    tracker = ProgressTracker()
    tracker.enter("train", 5)
    with tracker.step():
        pass
    with tracker.within("validate", 2), tracker.step(), tracker.phase("forward"):
        assert tracker.state[:4] == ("validate", 1, 2, "forward")
    assert tracker.state[:4] == ("train", 1, 5, None)
    with tracker.step():
        assert tracker.state[:3] == ("train", 2, 5)
    with pytest.raises(RuntimeError), tracker.within("validate", 2):
        raise RuntimeError
    assert tracker.state.stage == "validate", "where an exception was raised"


def test_progress_tracker_stays_where_an_exception_was_raised():
    tracker = ProgressTracker()
    with pytest.raises(RuntimeError), tracker.step(), tracker.phase("clip"):
        raise RuntimeError
    assert (tracker.state.step, tracker.state.phase) == (1, "clip")


def test_progress_tracker_records_the_time_of_a_change(monkeypatch):
    tracker = ProgressTracker()
    monkeypatch.setattr(phases.time, "monotonic", lambda: 1234.5)
    with tracker.step(), tracker.phase("forward"):
        assert tracker.state.since == 1234.5


def test_combined_instruments_get_the_same_step_and_its_failure(ticks):
    clock, tracker = PhaseClock(torch.device("cpu")), ProgressTracker()
    combined = CombinedInstrument(clock, tracker)
    run_step(combined, ticks)
    with pytest.raises(RuntimeError), combined.step(), combined.phase("sync"):
        raise RuntimeError
    assert clock.drain().step_s == [1.75]
    assert (tracker.state.step, tracker.state.phase) == (2, "sync")


def test_the_null_instrument_returns_one_context_that_swallows_nothing():
    assert NONE.step() is NONE.phase("forward")
    with pytest.raises(RuntimeError), NONE.step():
        raise RuntimeError
