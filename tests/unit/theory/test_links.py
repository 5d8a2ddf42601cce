"""The time of collectives on a ring."""

from __future__ import annotations

import pytest

from benchbox.theory.links import DEVICES, LINKS, Device, Link, collective_time_s, compute_time_s, traffic_time_s
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


def test_a_step_computes_also_what_it_recomputes_and_moves_the_bytes_of_the_optimizer_besides():
    device = Device(name="made up", flops_per_s=1e9, bytes_per_s=4e9, source="made up")
    assert compute_time_s(3 * 10**9, 2 * 10**9, device) == pytest.approx(3.0 + 0.5)
    estimate = Estimate(
        **dict.fromkeys(("peak_bytes", "resident_bytes", "logits_bytes", "total_numel"), 0),
        moment="backward",
        components={},
        collectives={},
        model_flops=2 * 10**9,
        recomputed_flops=10**9,
        optimizer_bytes=2 * 10**9,
        world_size=1,
    )
    assert estimate.step_time_s(device, None) == pytest.approx((3.5, 3.5))


def test_every_call_costs_its_base_latency_once_whatever_its_rounds():
    link = Link(name="based", latency_s=1e-3, bytes_per_s=1e9, base_s=0.5, source="made up")
    assert collective_time_s("all_gather", 3, 0, 4, link) == pytest.approx(3 * (0.5 + 3e-3))
    assert collective_time_s("all_reduce", 3, 0, 4, link) == pytest.approx(3 * (0.5 + 6e-3))


def test_figures_of_links_are_bytes_a_second_in_one_direction():
    bits_per_s = {"nvlink3": 8 * 600e9 / 2, "nvlink4": 8 * 900e9 / 2, "infiniband_hdr": 200e9, "infiniband_ndr": 400e9}
    bits_per_s |= {"pcie4": 16 * 16e9 * 128 / 130, "pcie5": 16 * 32e9 * 128 / 130}
    assert {name: link.bytes_per_s for name, link in LINKS.items()} == {
        name: pytest.approx(rate / 8, rel=1e-3) for name, rate in bits_per_s.items()
    }
