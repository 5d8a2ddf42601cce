"""Learning rates are drawn as text and as SVG."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import pytest

from benchbox.report.schedule import draw_bars, draw_svg
from tests.support.figure_svg import curve_points, texts_of

RATES = [0.0, 0.0, 0.001, 0.5, 1.0, 1.0]


def test_bars_are_blank_at_0_only_and_full_at_the_highest_rate() -> None:
    assert draw_bars(RATES, 1.0, 6) == "  ▁▄██"
    assert draw_bars(RATES, 2.0, 6) == "  ▁▂▄▄"
    assert draw_bars([0.0] * 3, 0.0, 6) == "   "


def test_bars_of_many_steps_have_the_width() -> None:
    assert draw_bars([0.0] * 500 + [1.0] * 500, 1.0, 10) == " " * 5 + "█" * 5


def test_a_figure_is_well_formed_themed_and_has_the_same_bytes_every_time() -> None:
    rates = {"a < b": RATES, "head": [1.0] * 6}
    text = draw_svg(rates, "Rates & steps")
    assert text == draw_svg(rates, "Rates & steps")
    root = ET.fromstring(text)
    assert root.find("{http://www.w3.org/2000/svg}title").text == "Rates & steps"
    assert texts_of(text)[:2] == ["a < b", "head"]
    assert "learning rate" in texts_of(text), "the title is too long for the axis"
    light, dark = text.split("prefers-color-scheme: dark")
    for variable in set(re.findall(r"var\((--\w+)\)", text)):
        assert f"{variable}: #" in light
        assert f"{variable}: #" in dark, "the file has the colours of both themes"
    assert "--card: #ffffff" in light, "white on light pages"
    assert "--card: #18202a" in dark
    assert not re.findall(r"#[0-9a-f]{6}\b", text.partition("</style>")[2])


def test_a_schedule_without_any_rate_is_drawn_flat() -> None:
    (points,) = curve_points(draw_svg({"frozen": [0.0] * 9}, "Rates"), "s0")
    assert len({y for _, y in points}) == 1


@pytest.mark.parametrize("steps", [2, 5000])
def test_a_jump_from_0_is_drawn_upright_however_many_steps_there_are(steps: int) -> None:
    """Few points are drawn of many steps, and those beside the jump always are."""
    (points,) = curve_points(draw_svg({"backbone": [0.0] * steps + [1.0] * steps}, "Rates"), "s0")
    assert len(points) < 700
    jump = next(index for index, (_, y) in enumerate(points) if y != points[0][1])
    assert [y for _, y in points] == pytest.approx([points[0][1]] * jump + [points[-1][1]] * (len(points) - jump), abs=0.2)
    width = points[-1][0] - points[0][0]
    assert width > 600
    assert points[jump][0] - points[jump - 1][0] == pytest.approx(width / (2 * steps - 1), abs=0.2)


def test_a_schedule_of_100000_steps_is_a_small_file() -> None:
    steps = 100_000
    text = draw_svg({"all": [0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]}, "Rates")
    assert len(text) < 40_000
