"""Geometry: lengths are proportional to values, and everything stays inside the chart."""

from __future__ import annotations

import itertools

import pytest

from benchbox.report.charts import CHARACTER, GAP, HALF, LONGEST_NAME, BarData, BarPart, layout_chart, nice_ticks

TEXT = CHARACTER + GAP  # room for one character


def entry(*values, spread=None, group="", layered=False):
    parts = tuple(BarPart(value=value, colour="s0", title="") for value in values)
    return BarData(group=group, name="n", parts=parts, spread=spread, text="t", layered=layered)


def drawn(*entries, scale=1.0):
    return layout_chart(key="k", title="t", description="d", entries=entries, scale=scale)


def test_bars_are_as_long_as_their_values_and_the_longest_leaves_room_for_its_text():
    short, long = drawn(entry(1.0), entry(4.0)).groups[0].bars
    assert long.segments[0].width == pytest.approx(4 * short.segments[0].width)
    assert long.end == pytest.approx(HALF - TEXT)


def test_a_whisker_beyond_the_bar_is_inside_the_chart_and_moves_the_text():
    (bar,) = drawn(entry(1.0, spread=(0.5, 2.0))).groups[0].bars
    assert bar.end == bar.whisker[1] == pytest.approx(HALF - TEXT)
    assert bar.segments[0].width == pytest.approx((bar.end - bar.x) / 2)


def test_one_launch_has_no_whisker():
    assert drawn(entry(1.0, spread=(1.0, 1.0))).groups[0].bars[0].whisker is None


def test_stacked_parts_follow_one_another_and_layered_ones_share_their_start():
    (stacked,) = drawn(entry(1.0, 2.0)).groups[0].bars
    assert stacked.segments[1].x == pytest.approx(stacked.segments[0].x + stacked.segments[0].width)
    (layered,) = drawn(entry(1.0, 2.0, layered=True)).groups[0].bars
    assert [segment.x for segment in layered.segments] == [layered.x, layered.x]
    assert layered.segments[0].width > layered.segments[1].width


def test_bars_of_a_group_are_adjacent_in_any_order_and_never_overlap():
    chart = drawn(entry(1.0, group="a"), entry(1.0, group="b"), entry(1.0, group="a"))
    assert [(group.name, len(group.bars)) for group in chart.groups] == [("a", 2), ("b", 1)]
    tops = [bar.y for group in chart.groups for bar in group.bars]
    assert all(later - earlier >= 16 for earlier, later in itertools.pairwise(tops))
    assert chart.height > tops[-1] + 16


def test_a_name_too_long_for_the_chart_is_cut():
    (bar,) = drawn(BarData(group="", name="n" * 80, parts=entry(1.0).parts, spread=None, text="t")).groups[0].bars
    assert bar.short_name == "n" * (LONGEST_NAME - 3) + "..."
    assert bar.name == "n" * 80
    assert bar.x == LONGEST_NAME * CHARACTER + GAP


def test_nothing_to_draw_is_no_chart():
    assert drawn(entry()) is None
    assert drawn() is None


@pytest.mark.parametrize(
    ("longest", "ticks"),
    [(14.1, [0, 5, 10]), (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (310, [0, 100, 200, 300]), (0.03, [0, 0.01, 0.02, 0.03])],
)
def test_ticks_are_round_numbers(longest, ticks):
    assert nice_ticks(longest) == pytest.approx(ticks)


def test_ticks_are_labelled_in_the_unit_of_the_axis():
    chart = drawn(entry(300 * 2**20), scale=2**20)
    assert [tick.text for tick in chart.ticks] == ["0", "100", "200", "300"]
