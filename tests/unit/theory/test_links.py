"""The time of collectives on a ring."""

from __future__ import annotations

import pytest

from benchbox.theory.links import DEVICES, LINKS, Device, Link, collective_time_s, traffic_time_s
from benchbox.theory.prediction import Estimate

FAST = Link(name="fast", latency_s=1e-6, bytes_per_s=1e9, base_s=0.0, source="made up")


def test_an_all_reduce_moves_every_byte_nearly_twice():
    """8 ranks: 2 * 7/8 of the bytes, in 14 steps."""
    assert collective_time_s("all_reduce", 1, 10**9, 8, FAST) == pytest.approx(2 * 7 / 8 + 14e-6)


def test_an_all_reduce_takes_as_long_as_a_reduce_scatter_and_an_all_gather():
    parts = {name: {"count": 3, "bytes": 10**6} for name in ("reduce_scatter", "all_gather")}
    assert collective_time_s("all_reduce", 3, 10**6, 4, FAST) == pytest.approx(traffic_time_s(parts, 4, FAST))


def test_one_rank_talks_to_nobody():
    assert collective_time_s("all_gather", 5, 10**9, 1, FAST) == 0.0


@pytest.mark.parametrize(("flops_per_s", "lower_s"), [(1e9, 4.0), (1e12, 1.0)])
def test_a_step_takes_at_least_the_longer_of_computing_and_communicating_and_at_most_both(flops_per_s, lower_s):
    estimate = Estimate(
        **dict.fromkeys(
            ("peak_bytes", "resident_bytes", "logits_bytes", "recomputed_flops", "optimizer_bytes", "total_numel"), 0
        ),
        moment="backward",
        components={},
        collectives={"broadcast": {"count": 1, "bytes": 10**9}},
        collectives_by_ranks={"2": {"broadcast": {"count": 1, "bytes": 10**9}}},
        model_flops=4 * 10**9,
        world_size=2,
    )
    device = Device(name="slow", flops_per_s=flops_per_s, bytes_per_s=1e9, source="made up")
    lower, upper = estimate.step_time_s(device, FAST)
    assert lower == pytest.approx(lower_s, rel=1e-5)
    assert upper == pytest.approx(4e9 / flops_per_s + 1.0, rel=1e-5)


def test_every_figure_has_a_source():
    assert all(entry.source for entry in (*LINKS.values(), *DEVICES.values()))
