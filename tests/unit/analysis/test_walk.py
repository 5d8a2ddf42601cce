from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchbox.analysis.walk import NO_BOUNDS, Bounds, WalkState, bounds_from, walk_state
from tests.support.tiers import in_tiers

LARGEST = 200


def walk(true_largest: int, **options) -> tuple[WalkState, list[int]]:
    """Walk on a machine on which every batch up to the largest fits. Return the final state and the batches, in order."""
    statuses: dict[int, str] = {}
    while (state := walk_state(statuses, **options)).outcome == "unfinished":
        assert state.batch is not None
        assert state.batch not in statuses, f"{state.batch} twice in {list(statuses)}"
        assert state.batch >= 1
        statuses[state.batch] = "ok" if state.batch <= true_largest else "oom"
        assert len(statuses) < 64, "it does not end"
    return state, list(statuses)


def is_certified(state: WalkState, true_largest: int) -> bool:
    if true_largest == 0:
        return state == WalkState(outcome="nothing fits", beyond=1)
    return state == WalkState(outcome="complete", largest=true_largest, beyond=true_largest + 1)


def most_launches(true_largest: int, predicted: int | None, start: int) -> int:
    """Return a bound: the start, the prediction, then at most two launches for each doubling of the error."""
    error = abs(true_largest - predicted) if predicted is not None else max(true_largest, start)
    return 4 + 2 * (max(error, 1)).bit_length()


@pytest.mark.parametrize(("start", "stride"), in_tiers([(1, 7), (2, 1), (2, 7), (7, 7), (300, 7)], lambda case: case[1] > 1))
def test_every_walk_ends_with_a_certificate_whatever_was_predicted(start, stride):
    for largest in range(LARGEST + 1):
        for predicted in (None, *range(0, LARGEST + 50, stride)):
            state, batches = walk(largest, start=start, predicted=predicted)
            assert is_certified(state, largest), (largest, predicted, batches)
            assert len(batches) <= most_launches(largest, predicted, start) + (start > largest) * 4, (
                largest,
                predicted,
                batches,
            )


@pytest.mark.parametrize("largest", [1, 2, 5, 64, 200])
def test_a_right_prediction_takes_three_launches(largest):
    _, batches = walk(largest, start=1, predicted=largest)
    assert len(batches) <= 3


@pytest.mark.parametrize("error", [-1, 1])
def test_a_prediction_that_is_wrong_by_one_takes_four_at_most(error):
    _, batches = walk(20, start=2, predicted=20 + error)
    assert len(batches) == (4 if error < 0 else 3)  # predicting one too many shows what does not fit


def test_steps_double_above_the_prediction_and_the_bracket_is_halved():
    assert walk(20, start=2, predicted=5)[1] == [2, 5, 6, 7, 9, 13, 21, 17, 19, 20]


def test_without_prediction_the_batch_doubles():
    assert walk(20, start=2)[1] == [2, 4, 8, 16, 32, 24, 20, 22, 21]


@given(
    largest=st.integers(0, 10_000),
    predicted=st.none() | st.integers(0, 20_000),
    start=st.integers(1, 100),
    at_most=st.none() | st.integers(100, 20_000),
    fits=st.integers(0, 10_000),
    fails=st.none() | st.integers(1, 20_000),
)
def test_bounds_of_other_walks_never_change_the_answer(largest, predicted, start, at_most, fits, fails):
    """True bounds save launches, false ones cost some, and what is certified is always launched."""
    bounds = Bounds(fits=fits, fails=fails)
    state, batches = walk(largest, start=start, predicted=predicted, at_most=at_most, bounds=bounds)
    if at_most is not None and largest >= at_most:
        assert (state.outcome, state.largest, state.beyond) in {("capped", at_most, None), ("pruned", None, None)}
    else:
        assert is_certified(state, largest) or (state.outcome == "pruned" and fails == 1)
    assert at_most is None or max(batches, default=0) <= at_most
    if state.outcome == "complete":
        assert {largest, largest + 1} <= set(batches)


@given(largest=st.integers(0, 300), predicted=st.none() | st.integers(0, 400), order=st.randoms())
def test_the_state_depends_on_the_launches_and_not_on_their_order(largest, predicted, order):
    """A walk that was stopped anywhere goes on as if it had not been."""
    _, batches = walk(largest, start=2, predicted=predicted)
    for count in range(len(batches) + 1):
        done = batches[:count]
        order.shuffle(done)
        state = walk_state({batch: "ok" if batch <= largest else "oom" for batch in done}, start=2, predicted=predicted)
        assert state.batch == (batches[count] if count < len(batches) else None)


@pytest.mark.parametrize(("statuses", "at_most"), [({4: "ok", 8: "ok"}, 4), ({8: "ok", 16: "oom"}, 4), ({4: "ok"}, 4)])
def test_a_cap_below_what_fits_already_ends_the_walk(statuses, at_most):
    """The cap was lowered, and the same command goes on."""
    state = walk_state(statuses, start=min(statuses), at_most=at_most)
    assert (state.outcome, state.batch, state.largest) == ("capped", None, max(b for b in statuses if statuses[b] == "ok"))


def test_another_failure_ends_the_walk_without_certificate():
    assert walk_state({2: "ok", 5: "hang"}, start=2, predicted=5).outcome == "failed"


def test_a_batch_that_fits_above_one_that_does_not_is_a_contradiction():
    assert walk_state({4: "ok", 3: "oom"}).outcome == "contradictory"


CELL = {"backend": "zero2", "cams": 1, "checkpointing": True, "batch": 2, "attention": "sdpa"}


def test_less_memory_means_fewer_cameras_or_checkpointing_and_all_else_equal():
    others = [
        (CELL | {"cams": 4, "batch": 3}, "ok"),  # needs more, and fits
        (CELL | {"cams": 4, "batch": 4}, "oom"),  # shows nothing about one camera
        (CELL | {"checkpointing": False, "batch": 6}, "ok"),
        (CELL | {"checkpointing": False, "attention": "eager", "batch": 9}, "ok"),  # differs in more
        (CELL | {"batch": 99}, "ok"),  # the walk itself
    ]
    assert bounds_from(CELL, others) == Bounds(fits=6)
    more = CELL | {"cams": 4, "checkpointing": False}
    assert bounds_from(more, [(CELL | {"batch": 7}, "oom"), (CELL, "ok")]) == Bounds(fails=7, fails_cell=CELL | {"batch": 7})
    assert bounds_from(CELL, []) == NO_BOUNDS


def test_a_walk_whose_smallest_batch_cannot_fit_is_pruned_without_a_launch():
    assert walk(0, start=2, bounds=Bounds(fails=1)) == (WalkState(outcome="pruned"), [])


def test_bounds_that_close_the_bracket_leave_the_two_launches_of_the_certificate():
    assert walk(6, start=2, bounds=Bounds(fits=6, fails=7))[1] == [2, 6, 7]
