"""A gradient norm is judged by a fixed bound or by the median of the norms before it."""

from __future__ import annotations

import json
import math

import pytest

from benchbox.errors import GradientSpikeError, NonFiniteError
from benchbox.optim import SpikeGuard
from benchbox.spec.optim import SpikeSpec


def test_a_norm_far_above_the_median_is_skipped_and_forgotten() -> None:
    """The norms of skipped steps do not raise the limit; those of taken steps move it."""
    guard = SpikeGuard(SpikeSpec(factor=3.0, window=10))
    assert [guard.skips(norm) for norm in [1.0] * 10] == [False] * 10
    assert [guard.skips(norm) for norm in (3.1, 2.9, 1e9, 3.1)] == [True, False, True, True]
    assert guard.skipped == 3
    for _ in range(6):
        guard.skips(2.0)
    assert not guard.skips(3.1), "most of the last norms are 2"


def test_nothing_is_a_spike_before_there_are_ten_norms() -> None:
    guard = SpikeGuard(SpikeSpec(factor=2.0, window=100))
    assert [guard.skips(norm) for norm in (1.0, 50.0, 0.01, *[1.0] * 7)] == [False] * 10
    assert guard.skips(50.0)


def test_a_small_window_judges_when_it_is_full() -> None:
    guard = SpikeGuard(SpikeSpec(factor=2.0, window=2))
    assert [guard.skips(norm) for norm in (1.0, 1.0, 2.1)] == [False, False, True]


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_a_spike_from_the_first_step_on(norm: float) -> None:
    assert SpikeGuard(SpikeSpec()).skips(norm)
    with pytest.raises(NonFiniteError, match=r"optim\.spike stops the training"):
        SpikeGuard(SpikeSpec(action="stop")).skips(norm)


def test_a_fixed_bound_holds_from_the_first_step_on_and_can_stop_the_training() -> None:
    guard = SpikeGuard(SpikeSpec(action="stop", max=5.0))
    assert not guard.skips(5.0)
    with pytest.raises(GradientSpikeError, match=r"the gradient norm is 6, above 5: optim\.spike stops the training"):
        guard.skips(6.0)


def test_a_guard_continues_from_its_state() -> None:
    guard, resumed = (SpikeGuard(SpikeSpec(factor=2.0, window=10)) for _ in range(2))
    for norm in [1.0] * 10 + [9.0]:
        guard.skips(norm)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert resumed.skipped == 1
    assert resumed.skips(2.1)


def test_a_guard_that_forgets_judges_after_ten_further_norms() -> None:
    guard = SpikeGuard(SpikeSpec(factor=2.0, window=20))
    for _ in range(15):
        guard.skips(1.0)
    guard.forget()
    assert [guard.skips(50.0) for _ in range(10)] == [False] * 10
    assert guard.skips(101.0)


def test_a_guard_that_continues_still_forgets_norms_beyond_its_window() -> None:
    """The median of 1 and 2 is 1.5, that of 1, 1 and 2 is 1."""
    guard, resumed = (SpikeGuard(SpikeSpec(factor=2.0, window=2)) for _ in range(2))
    for _ in range(2):
        guard.skips(1.0)
    resumed.load_state_dict(guard.state_dict())
    assert [resumed.skips(norm) for norm in (2.0, 3.0)] == [False, False]
