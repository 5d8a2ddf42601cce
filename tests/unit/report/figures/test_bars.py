"""Bars as a reader sees them: as long as their values, in groups, with name and value as text."""

from __future__ import annotations

import itertools

import pytest

from benchbox.report.figures.bars import Bar, BarPart, bar_drawing
from benchbox.report.figures.drawing import HATCHES, PRINT
from tests.support.figure_svg import drawn_bars, numbers, placed_texts, texts_of


def bar(*values, spread=None, group="", name="n", text="t", colours=("s0", "p2", "p3")):
    parts = tuple(
        BarPart(f"part {colour}", value, colour, f"{value:g} u") for value, colour in zip(values, colours, strict=False)
    )
    return Bar(group=group, name=name, parts=parts, spread=spread, text=text)


def svg_of(*bars, **options):
    (drawing,) = bar_drawing(bars, key="k", title="Size (u)", description="d.", **options)
    return drawing.svg()


def width(drawn):
    return drawn.right - drawn.left


def test_bars_are_as_long_as_their_values_and_have_the_value_beside_them():
    svg = svg_of(bar(1.0, name="short", text="1 u"), bar(4.0, name="long", text="4 u"))
    short, long = drawn_bars(svg)
    assert width(long) == pytest.approx(4 * width(short), rel=1e-3)
    for name, value, drawn in (("short", "1 u", short), ("long", "4 u", long)):
        left, right = (next(text for text in placed_texts(svg) if text.text == word) for word in (name, value))
        assert left.x < drawn.left < drawn.right < right.x < drawn.right + 8
        assert drawn.y < left.y == pytest.approx(right.y, abs=2)


def test_a_whisker_spans_the_launches_and_moves_the_value_beyond_it():
    svg = svg_of(bar(1.0, spread=(0.5, 2.0)))
    (drawn,) = drawn_bars(svg)
    whisker = svg.split("stroke: var(--ink); stroke-width: 1.2")[0].rpartition('<path d="')[2].partition('"')[0]
    low, _, high, _ = numbers(whisker)
    assert (low - drawn.left, high - drawn.left) == pytest.approx((width(drawn) / 2, 2 * width(drawn)), abs=0.05)
    assert next(text.x for text in placed_texts(svg) if text.text == "t") > high


def test_one_launch_has_no_whisker():
    assert "stroke-width: 1.2" not in svg_of(bar(1.0, spread=(1.0, 1.0)))


def test_stacked_parts_follow_one_another_and_layered_ones_share_their_start():
    first, second = drawn_bars(svg_of(bar(1.0, 2.0)))
    assert second.left == pytest.approx(first.right, abs=0.02)
    assert width(second) == pytest.approx(2 * width(first), rel=1e-3)
    behind, front = drawn_bars(svg_of(bar(1.0, 2.0), is_layered=True))
    assert behind.left == front.left
    assert (behind.colour, front.colour) == ("p2", "s0"), "the longest is drawn first"


def test_bars_of_a_group_are_adjacent_below_its_name_in_any_order_and_never_overlap():
    svg = svg_of(bar(1.0, group="a", name="1"), bar(1.0, group="b", name="2"), bar(1.0, group="a", name="3"))
    assert [text for text in texts_of(svg) if text in ["a", "b", "1", "2", "3"]] == ["a", "1", "3", "b", "2"]
    tops = [drawn.y for drawn in drawn_bars(svg)]
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(tops))


def test_long_names_are_complete_in_several_lines():
    """No line of a name or a group is beyond the width of the figure."""
    words = [f"field{number}=value{number}" for number in range(12)]
    svg = svg_of(bar(1.0, name=" ".join(words), group=" ".join(words)), bar(1.0))
    texts = placed_texts(svg)
    assert " ".join(text.text for text in texts).count("field7=value7") == 2
    assert all(text.x >= 0 for text in texts)
    lines = [text.text for text in texts if text.text.startswith("field")]
    assert " ".join(lines).split() == words * 2
    assert max(map(len, lines)) < 70


def test_a_cell_without_a_value_has_its_status_in_place_of_a_bar_in_the_colour_of_failures():
    svg = svg_of(bar(1.0), bar(name="failed", text="oom"))
    assert len(drawn_bars(svg)) == 1
    before, _, _ = svg.partition(">oom<")
    assert "var(--bad)" in before[before.rindex("<text") :]


def test_nothing_to_draw_is_no_figure():
    assert list(bar_drawing([bar()], key="k", title="t", description="d")) == []
    assert list(bar_drawing([], key="k", title="t", description="d")) == []


def test_ticks_of_millions_have_all_their_digits_and_no_factor_beside_the_axis():
    texts = texts_of(svg_of(bar(7.7e6)))
    assert "2000000" in texts
    assert not [text for text in texts if "1e" in text]


def test_every_value_and_part_is_in_the_description():
    svg = svg_of(bar(1.0, 2.0, group="g", name="zero2", text="3 u (1/2 ok)"), notes=["Read this."])
    assert ">d. g zero2: 3 u (1/2 ok) (part s0 1 u, part p2 2 u). Read this.</desc>" in svg


def test_parts_are_told_apart_by_hatches_and_the_legend_has_the_same_ones():
    """In greyscale no two parts look alike, on a page as in print."""
    assert len(set(HATCHES.values())) == len(HATCHES) == len(PRINT.parts) + 1
    colours = list(HATCHES)
    legend = [(f"name of {colour}", colour) for colour in colours]
    svg = svg_of(bar(*([1.0] * len(colours)), colours=colours), legend=legend, is_wide=True)
    bars = drawn_bars(svg)
    assert [drawn.colour for drawn in bars] == colours
    assert len({drawn.hatch for drawn in bars}) == len(colours)
    assert {text for text in texts_of(svg) if text.startswith("name of")} == {name for name, _ in legend}
    assert svg.count("url(#k-h") == 2 * (len(colours) - 1), "of each hatched part, the bar and the key"


def test_a_figure_has_the_same_bytes_every_time():
    bars = [bar(1.0, 2.0, group=group, name=name) for group in "ab" for name in "xyz"]
    assert svg_of(*bars) == svg_of(*bars)
