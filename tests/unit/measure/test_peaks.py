"""Rates of products."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
import torch

from benchbox.measure.peaks import (
    _SUSTAINED_S,
    bfloat16_slowdown,
    copy_rate,
    fastest,
    matmul_rates,
    time_together,
    update_rate,
)

CPU = torch.device("cpu")


def test_of_several_calls_the_one_that_takes_the_least_time_is_measured():
    """Whatever its place, and although the first call of each takes longer."""

    def call(seconds):
        first = iter([0.02])
        return lambda: time.sleep(next(first, seconds))

    for times in ((0.001, 0.01, 0.01), (0.01, 0.001, 0.01), (0.01, 0.01, 0.001)):
        calls = [call(seconds) for seconds in times]
        assert fastest(calls, CPU) == times.index(0.001)


def test_a_call_that_takes_long_is_tried_once_after_its_first():
    """A product that a processor has no instructions for may take a minute, and a group without progress is ended."""
    counts = Counter()

    def call(name, seconds):
        return lambda: (counts.update([name]), time.sleep(seconds))

    assert fastest([call("slow", 0.6), call("fast", 0.001)], CPU) == 1
    assert counts["slow"] == 2
    assert counts["fast"] > 2


@pytest.mark.parametrize("batch", [1, 8])
def test_the_rate_is_that_of_the_layout_in_which_products_are_fastest(monkeypatch, batch):
    """Each class of shape is tried in all three by some of its rows; of the fastest, the whole product is timed."""
    tried, products = [], []

    def choose(calls, device):
        tried.append(len(calls))
        for call in calls:
            call()
        return 1

    monkeypatch.setattr("benchbox.measure.peaks.fastest", choose)
    name = "bmm" if batch > 1 else "mm"
    through = getattr(torch, name)

    def product(left, right, *, out):
        products.append((left.shape[-2], left.stride()[-1], right.stride()[-1]))
        return through(left, right, out=out)

    monkeypatch.setattr(f"torch.{name}", product)
    rates = matmul_rates({"small": (batch, 1024, 32, 64)}, CPU, 0.001, lambda: None)
    assert tried == [3, 3]
    assert products[:3] == [(256, 1, 64), (256, 1, 1), (256, 256, 1)]
    whole = Counter(product for product in products if product[0] == 1024)
    assert [*whole] == [(1024, 1, 1)]
    assert len(products) - whole.total() == 6, "once for each dtype, to choose"
    assert all(rate["small"]["per_s"] > 0 for rate in rates.values())


def test_a_device_does_the_work_for_a_while_before_it_is_timed(monkeypatch):
    """A GPU is slower once its power limit holds it back; the clock advances with calls, of 2 ms, and later of 4."""
    clock, calls = [0.0], itertools.count()

    def call():
        clock[0] += 0.002 if next(calls) < 200 else 0.004

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert time_together(call, CPU, 1.0).seconds == pytest.approx(0.002)
    calls = itertools.count()
    monkeypatch.setitem(_SUSTAINED_S, "cpu", 1.0)
    assert time_together(call, CPU, 1.0).seconds == pytest.approx(0.004)
    assert _SUSTAINED_S["cuda"] == 1.0


def test_the_slowdown_of_bfloat16_is_that_of_all_three_products_of_a_layer(monkeypatch):
    """The clock advances with products only: in bfloat16, the one whose right factor is stored by columns takes long."""
    clock = [0.0]
    through = torch.mm

    def product(left, right, *, out):
        by_columns = right.stride()[-1] > 1
        clock[0] += 10.0 if left.dtype == torch.bfloat16 and by_columns else 1.0
        return through(left, right, out=out)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch, "mm", product)
    assert bfloat16_slowdown() == (10 + 1 + 1) / 3


def test_rates_count_two_operations_for_a_multiply_add_and_both_what_is_read_and_what_is_written(monkeypatch):
    """The clock advances by a second each time it is read, so that every call takes one."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    rates = matmul_rates({"small": (3, 5, 7, 11)}, CPU, 0.001, lambda: None)
    assert {dtype: rate["small"]["per_s"] for dtype, rate in rates.items()} == dict.fromkeys(
        ("float32", "bfloat16"), 2.0 * 3 * 5 * 7 * 11
    )
    assert copy_rate(64, CPU, 0.001)["per_s"] == update_rate(64, CPU, 0.001)["per_s"] == 2 * 64
