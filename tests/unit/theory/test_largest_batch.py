from __future__ import annotations

import pytest

from benchbox.theory.largest_batch import MAX_PREDICTED, largest_batch


def moments(*lines: tuple[int, int]):
    """Return the peak of a step with moments of a fixed part and a part per sample, and the batches it was asked for."""
    asked: list[int] = []

    def peak(batch: int) -> int:
        asked.append(batch)
        return max(fixed + per_sample * batch for fixed, per_sample in lines)

    return peak, asked


@pytest.mark.parametrize("limit", range(100, 900, 7))
@pytest.mark.parametrize("at_most", [None, 5])
def test_the_largest_batch_within_the_limit_is_found_with_few_predictions(limit, at_most):
    peak, asked = moments((300, 2), (120, 16), (20, 23))
    expected = max((batch for batch in range(1, 200) if peak(batch) <= limit), default=0)
    asked.clear()
    expected = expected if at_most is None else min(expected, at_most)
    assert largest_batch(peak, limit, at_most=at_most) == expected
    assert len(asked) <= 12
    assert len(set(asked)) == len(asked)


def test_batches_beyond_those_that_are_predicted_are_extrapolated():
    peak, asked = moments((100, 3))
    assert largest_batch(peak, 100 + 3 * 4000) == 4000
    assert largest_batch(peak, 100 + 3 * 4000, at_most=500) == 500
    assert max(asked) <= MAX_PREDICTED


@pytest.mark.parametrize("fixed", [200, 250, 400])
def test_a_moment_that_grows_faster_and_has_the_peak_from_some_batch_on_sets_the_line_beyond(fixed):
    """The line through the smallest and the largest batch that are predicted would end far beyond the limit."""
    peak, asked = moments((fixed * 1000, 20), (100_000, 3000))
    assert largest_batch(peak, 100_000 + 3000 * 700) == 700
    assert len(asked) <= 6


def test_a_peak_that_hardly_grows_is_not_extrapolated_without_end():
    peak, _ = moments((500_000, 20), (100_000, 3))
    assert largest_batch(peak, 1_000_000) == 16 * MAX_PREDICTED


def test_a_peak_that_does_not_grow_ends_too():
    peak, asked = moments((100, 0))
    assert largest_batch(peak, 100, at_most=1000) == 1000
    assert len(asked) < 10
