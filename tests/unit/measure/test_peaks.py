"""Rates of products."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

from benchbox.measure.peaks import fastest, matmul_rates

CPU = torch.device("cpu")


def test_of_several_calls_the_one_that_takes_the_least_time_is_measured():
    """Whatever its place, and although the first call of each takes longer."""

    def call(seconds):
        first = iter([0.02])
        return lambda: time.sleep(next(first, seconds))

    for times in ((0.001, 0.01, 0.01), (0.01, 0.001, 0.01), (0.01, 0.01, 0.001)):
        calls = [call(seconds) for seconds in times]
        assert fastest(calls, CPU) is calls[times.index(0.001)]


@pytest.mark.parametrize("batch", [1, 8])
def test_the_rate_is_that_of_the_layout_in_which_products_are_fastest(monkeypatch, batch):
    """Each class of shape is tried in all three, of which only the fastest is timed."""
    tried = []

    def choose(calls, device):
        tried.append(len(calls))
        for call in calls:
            call()
        return calls[1]

    monkeypatch.setattr("benchbox.measure.peaks.fastest", choose)
    strides = []
    through = torch.bmm if batch > 1 else torch.mm
    monkeypatch.setattr(
        f"torch.{'bmm' if batch > 1 else 'mm'}",
        lambda left, right, *, out: (strides.append((left.stride()[-1], right.stride()[-1])), through(left, right, out=out))[1],
    )
    rates = matmul_rates({"small": (batch, 16, 32, 64)}, CPU, 0.001, lambda: None)
    assert tried == [3, 3]
    assert strides[:3] == [(1, 64), (1, 1), (16, 1)]
    calls = Counter(strides)
    assert calls[1, 64] == calls[16, 1] == 2, "once for each dtype, to choose"
    assert calls[1, 1] > 2
    assert all(rate["small"]["per_s"] > 0 for rate in rates.values())
