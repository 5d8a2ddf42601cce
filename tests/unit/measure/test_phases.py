from __future__ import annotations

import time

import pytest
import torch

from benchbox.measure import phases
from benchbox.measure.phases import NONE, PHASES, PhaseClock, ProgressTracker, CombinedInstrument


@pytest.fixture
def ticks(monkeypatch):
    """A host clock that a test advances by hand."""
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def a_step(instrument, ticks, micro_steps=1):
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
    a_step(clock, ticks, micro_steps=4)
    a_step(clock, ticks, micro_steps=1)
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


def test_draining_forgets(ticks):
    clock = PhaseClock(torch.device("cpu"))
    a_step(clock, ticks)
    clock.drain()
    assert clock.drain().step_s == []


def test_a_step_that_failed_is_not_a_sample(ticks):
    clock = PhaseClock(torch.device("cpu"))
    with pytest.raises(RuntimeError), clock.step(), clock.phase("forward"):
        raise RuntimeError
    a_step(clock, ticks)
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


def test_position_numbers_steps_within_a_stage_and_names_the_phase():
    position = ProgressTracker()
    position.enter("measure", 2)
    assert position.state[:4] == ("measure", None, 2, None)
    with position.step():
        with position.phase("backward"):
            assert position.state[:4] == ("measure", 1, 2, "backward")
        assert position.state.phase is None
    with position.step():
        assert position.state.step == 2
    position.enter("probe")
    with position.step():
        assert position.state[:2] == ("probe", 1)


def test_position_stays_where_an_exception_was_raised():
    position = ProgressTracker()
    with pytest.raises(RuntimeError), position.step(), position.phase("clip"):
        raise RuntimeError
    assert (position.state.step, position.state.phase) == (1, "clip")


def test_position_says_since_when(monkeypatch):
    position = ProgressTracker()
    monkeypatch.setattr(phases.time, "time", lambda: 1234.5)
    with position.step(), position.phase("forward"):
        assert position.state.since == 1234.5


def test_together_every_instrument_sees_the_same_step_and_its_failure(ticks):
    clock, position = PhaseClock(torch.device("cpu")), ProgressTracker()
    both = CombinedInstrument(clock, position)
    a_step(both, ticks)
    with pytest.raises(RuntimeError), both.step(), both.phase("sync"):
        raise RuntimeError
    assert clock.drain().step_s == [1.75]
    assert (position.state.step, position.state.phase) == (2, "sync")


def test_the_null_instrument_hands_out_one_object_and_swallows_nothing():
    assert NONE.step() is NONE.phase("forward")
    with pytest.raises(RuntimeError), NONE.step():
        raise RuntimeError
