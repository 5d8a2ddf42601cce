"""The time of collectives on a ring."""

from __future__ import annotations

import pytest

from benchbox.theory.links import DEVICES, LINKS, Link, collective_time_s, traffic_time_s

FAST = Link(name="fast", latency_s=1e-6, bytes_per_s=1e9, base_s=0.0, source="made up")


def test_an_all_reduce_moves_every_byte_nearly_twice():
    """8 ranks: 2 * 7/8 of the bytes, in 14 steps."""
    assert collective_time_s("all_reduce", 1, 10**9, 8, FAST) == pytest.approx(2 * 7 / 8 + 14e-6)


def test_an_all_reduce_takes_as_long_as_a_reduce_scatter_and_an_all_gather():
    parts = {name: {"count": 3, "bytes": 10**6} for name in ("reduce_scatter", "all_gather")}
    assert collective_time_s("all_reduce", 3, 10**6, 4, FAST) == pytest.approx(traffic_time_s(parts, 4, FAST))


def test_one_rank_talks_to_nobody():
    assert collective_time_s("all_gather", 5, 10**9, 1, FAST) == 0.0


def test_every_figure_has_a_source():
    assert all(entry.source for entry in (*LINKS.values(), *DEVICES.values()))
