"""A gradient norm is judged by a fixed bound or by the median of the norms before it."""

from __future__ import annotations

import json
import math

import pytest

from benchbox.errors import BenchboxError, GradientSpikeError, NonFiniteError
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


def skip_until_the_end(guard: SpikeGuard, norm: float, most: int = 5000) -> tuple[int, BenchboxError | None]:
    """Return the number of steps that a guard skips before it ends the training, and the error by which it does."""
    for number in range(most):
        try:
            assert guard.skips(norm)
        except BenchboxError as error:
            return number, error
    return most, None


def test_a_lasting_change_of_level_ends_the_training_after_as_many_skipped_steps_as_the_window_has_norms() -> None:
    """No norm above the limit is remembered, so that the limit never follows."""
    guard = SpikeGuard(SpikeSpec(factor=10.0, window=100))
    for _ in range(20):
        guard.skips(0.1)
    skipped, error = skip_until_the_end(guard, 1.1)
    assert skipped == 99
    assert isinstance(error, GradientSpikeError)
    expected = "optim.spike skipped 100 steps in a row, and the weights no longer change: the gradient norm is 1.1, above 1; "
    assert str(error) == expected + "train anew with a higher optim.spike.factor or a lower optim.lr"


def test_norms_that_are_never_finite_end_the_training_as_such() -> None:
    skipped, error = skip_until_the_end(SpikeGuard(SpikeSpec(window=20)), math.nan)
    assert skipped == 19
    assert isinstance(error, NonFiniteError)
    assert "skipped 20 steps in a row, and the weights no longer change: the gradient norm is nan; train anew" in str(error)


def test_a_fixed_bound_and_a_small_window_end_the_training_after_ten_skipped_steps() -> None:
    skipped, error = skip_until_the_end(SpikeGuard(SpikeSpec(max=5.0, window=2)), 6.0)
    assert skipped == 9
    assert "a higher optim.spike.max" in str(error)


def test_steps_that_are_taken_between_skipped_ones_let_the_training_go_on() -> None:
    guard = SpikeGuard(SpikeSpec(max=5.0, window=10))
    assert [guard.skips(norm) for norm in ([6.0] * 9 + [1.0]) * 10] == ([True] * 9 + [False]) * 10


def test_skipped_steps_in_a_row_are_counted_across_a_checkpoint_and_a_state_without_the_count_loads() -> None:
    guard, resumed, older = (SpikeGuard(SpikeSpec(max=5.0, window=10)) for _ in range(3))
    for _ in range(6):
        guard.skips(6.0)
    state = json.loads(json.dumps(guard.state_dict()))
    resumed.load_state_dict(state)
    assert skip_until_the_end(resumed, 6.0)[0] == 3
    older.load_state_dict({"norms": state["norms"], "skipped": 6})
    assert skip_until_the_end(older, 6.0)[0] == 9
