"""When a rank was blocked in its collectives, from the times that were noted."""

from __future__ import annotations

import pytest
import torch

from benchbox.measure import collective_times
from benchbox.measure.collective_times import CollectiveClock


@pytest.fixture
def clock() -> CollectiveClock:
    """A clock after one step: backward from 10 to 100 ns, clip from 100 to 110."""
    times = iter([0, 10, 100, 100, 110, 120])
    clock = CollectiveClock(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_times.time, "time_ns", lambda: next(times))
        with clock.step():
            for name in ("backward", "clip"):
                with clock.phase(name):
                    pass
    clock.reason = None  # as on several ranks
    return clock


def test_without_a_wait_a_rank_is_blocked_from_the_last_collective_of_a_phase_to_its_end(clock: CollectiveClock) -> None:
    """DDP waits for its transfers at the end of backward; of another phase the end says nothing."""
    assert clock._blocked(0, [("a", 20), ("b", 60), ("c", 105)]) == [
        {"start": 60, "end": 100, "until": "completion"},
        {"start": 105, "end": 110, "until": "arrival"},
    ]


@pytest.mark.parametrize(("size", "first_ns", "overflows"), [("3", 50, False), ("2", 50, True), ("2", -5, False)])
def test_a_recorder_that_has_lost_collectives_of_the_steps_gives_no_times(
    clock: CollectiveClock, monkeypatch: pytest.MonkeyPatch, size: str, first_ns: int, overflows: bool
) -> None:
    """One that has a collective from before the steps has lost only others from before."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", size)
    monkeypatch.setattr(collective_times, "_read_recorder", lambda: [("g/1", first_ns), ("g/2", 60)])
    times, reason = clock.result()
    if overflows:
        assert times is None
        assert reason is not None
        assert reason.startswith("there were more collectives than torch records")
    else:
        assert times is not None
        in_steps = [[key, at] for key, at in (("g/1", first_ns), ("g/2", 60)) if at > 0]
        assert (times["arrivals"], reason) == ([in_steps], None)
