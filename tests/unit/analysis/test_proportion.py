"""The interval of a success rate."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from benchbox.analysis.proportion import wilson_interval


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (1, 1), (47, 50), (25, 50), (50, 50)])
def test_the_interval_is_that_of_scipy(successes: int, trials: int) -> None:
    expected = binomtest(successes, trials).proportion_ci(method="wilson")
    assert wilson_interval(successes, trials) == pytest.approx((expected.low, expected.high))


def test_an_interval_needs_a_trial() -> None:
    with pytest.raises(ValueError, match="at least one trial"):
        wilson_interval(0, 0)
