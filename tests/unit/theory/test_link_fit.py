"""Fits of latency and bandwidth recover the line that times lie on, and say how far off it they are."""

from __future__ import annotations

import pytest

from benchbox.theory.link_fit import fit_link
from benchbox.theory.links import MeasuredLink, collective_time_s, link_of_fit, traffic_time_s

SIZES = [2**power for power in range(10, 27, 2)]


def test_a_fit_of_times_on_a_line_is_exact() -> None:
    fit = fit_link([(size, 2e-5 + size / 3e9) for size in SIZES])
    assert (fit.latency_s, fit.bytes_per_s) == (pytest.approx(2e-5), pytest.approx(3e9))
    assert fit.max_error < 1e-9


def test_one_size_that_is_off_is_the_largest_error_and_hardly_moves_the_typical_one() -> None:
    times = [(size, 2e-5 + size / 3e9) for size in SIZES]
    times[4] = (times[4][0], 2 * times[4][1])
    fit = fit_link(times)
    assert 0.3 < fit.max_error < 0.6
    assert fit.median_error < 0.1


def test_a_latency_is_never_negative() -> None:
    fit = fit_link([(1024, 1e-6), (4096, 9e-6)])
    assert fit.latency_s == 0.0
    # The line through 0 with the least sum of squares of relative errors: weights are 1 / seconds^2, here 1 and 1/81.
    assert fit.bytes_per_s == pytest.approx(1e6 * (1024**2 + 4096**2 / 81) / (1024 * 1 + 4096 * 9 / 81))


def test_times_that_do_not_grow_have_no_bandwidth() -> None:
    with pytest.raises(ValueError, match="do not grow"):
        fit_link([(1024, 2e-5), (4096, 1e-5)])


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_a_measured_link_gives_the_fitted_time_at_the_measured_number_of_ranks(operation: str) -> None:
    link = link_of_fit(operation, 4, latency_s=2e-5, bytes_per_s=3e9, source="here")
    assert collective_time_s(operation, 3, 3 * 2**20, 4, link) == pytest.approx(3 * (2e-5 + 2**20 / 3e9))


def test_traffic_is_timed_by_the_link_of_each_collective() -> None:
    links = {
        name: link_of_fit(name, 2, latency_s=0.0, bytes_per_s=speed, source="here")
        for name, speed in (("all_gather", 1e9), ("all_reduce", 2e9))
    }
    measured = MeasuredLink(name="measured", by_operation=links, source="here", error=0.1)
    traffic = {name: {"count": 1, "bytes": 10**9} for name in ("all_gather", "all_reduce", "all_to_all")}
    assert traffic_time_s(traffic, 2, measured) == pytest.approx(1.0 + 0.5 + 1.0)  # all_to_all as the all-gather
