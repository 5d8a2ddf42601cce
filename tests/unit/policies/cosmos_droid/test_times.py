"""Times of training."""

from __future__ import annotations

import pytest
import torch
from benchbox_policies.cosmos_droid.times import waver_time


def test_times_are_most_dense_in_the_middle_before_they_are_shifted():
    """The density is the inverse of the slope, 2.29 - 1.29 pi / 2 sin(pi u), which is smallest at u = 1/2."""
    uniform = torch.linspace(0, 1, 1001)
    times = waver_time(uniform, 1.0)
    slopes = (times[:-1] - times[1:]).double() * 1000
    middles = (uniform[:-1] + uniform[1:]).double() / 2
    torch.testing.assert_close(slopes, 2.29 - 1.29 * torch.pi / 2 * (torch.pi * middles).sin(), rtol=0, atol=1e-3)
    assert times[[0, 500, 1000]].tolist() == pytest.approx([1.0, 0.5, 0.0], abs=1e-6)


def test_the_shift_of_480p_moves_times_towards_noise():
    """Their median is 5/6; those that are nearly clean are rare."""
    uniform = torch.linspace(0, 1, 100_001)[:-1]
    times, unshifted = waver_time(uniform, 5.0), waver_time(uniform, 1.0)
    assert times.dtype == torch.float32
    assert times.median().item() == pytest.approx(5 / 6, abs=1e-4)
    assert (times < 0.5).double().mean() == (unshifted < 1 / 6).double().mean()
    assert 0.05 < (times < 0.5).double().mean() < 0.15
    assert 0 < times.min() < times.max() <= 1
