"""Distance of a phase from the measured peaks, by hand."""

from __future__ import annotations

import pytest

from benchbox.analysis.roofline import attainment
from tests.support.peaks import made_up_peaks

LARGE, THIN = ("float32", "large"), ("float32", "thin")


def test_flops_are_compared_with_the_highest_rate_and_with_that_of_their_shapes() -> None:
    """50 GFLOP in a second: half of the highest rate; 25 of them take 0.25 s at best and the 25 thin ones 0.5 s."""
    rates = attainment(1.0, {LARGE: int(25e9), THIN: int(25e9)}, int(1e9), made_up_peaks())
    assert rates["flops_per_s"] == 50e9
    assert rates["of_peak"] == pytest.approx(0.5)
    assert rates["of_shapes"] == pytest.approx(0.75)
    assert rates["of_memory"] == pytest.approx(0.1)
    assert rates["bound"] == "compute"


def test_products_in_two_dtypes_count_each_by_its_own_peak() -> None:
    rates = attainment(1.0, {LARGE: int(25e9), ("bfloat16", "large"): int(100e9)}, 0, made_up_peaks())
    assert rates["of_peak"] == pytest.approx(0.5)


def test_work_without_products_is_bound_by_bytes() -> None:
    rates = attainment(1.0, {}, int(8.3e9), made_up_peaks())
    assert (rates["of_memory"], rates["bound"], rates["of_peak"]) == (pytest.approx(0.83), "bytes", None)
    assert rates["flops_reason"] == "no products"


def test_bytes_that_caches_deliver_have_no_share_of_the_rate_of_memory() -> None:
    rates = attainment(1.0, {LARGE: int(50e9)}, int(20e9), made_up_peaks())
    assert rates["of_memory"] is None
    assert "caches" in (rates["bytes_reason"] or "")
    assert rates["bound"] == "compute"


def test_more_than_all_of_a_peak_is_unknown_with_the_remedy() -> None:
    rates = attainment(1.0, {LARGE: int(101e9)}, 0, made_up_peaks())
    assert rates["of_peak"] is rates["of_shapes"] is None
    assert "measure the peaks again" in (rates["flops_reason"] or "")


def test_a_dtype_that_was_not_measured_has_no_share() -> None:
    rates = attainment(1.0, {("float64", "large"): 1}, 0, made_up_peaks())
    assert rates["of_peak"] is None
    assert rates["flops_reason"] == "the peaks have no products in float64"


def test_without_peaks_rates_are_there_and_shares_are_null_with_the_reason() -> None:
    rates = attainment(2.0, {LARGE: 10}, 20, None, "not measured")
    assert (rates["flops_per_s"], rates["bytes_per_s"]) == (5.0, 10.0)
    assert [rates[key] for key in ("of_peak", "of_shapes", "of_memory", "bound")] == [None] * 4  # type: ignore[literal-required]
    assert rates["flops_reason"] == rates["bytes_reason"] == "not measured"


def test_work_that_is_near_to_no_peak_has_no_bound() -> None:
    assert attainment(1.0, {LARGE: int(0.5e9)}, int(0.05e9), made_up_peaks())["bound"] is None
