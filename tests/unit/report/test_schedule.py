"""Learning rates are drawn as text and as SVG."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from benchbox.report.schedule import draw_bars, draw_svg

RATES = [0.0, 0.0, 0.001, 0.5, 1.0, 1.0]


def test_bars_are_blank_at_0_only_and_full_at_the_highest_rate() -> None:
    assert draw_bars(RATES, 1.0, 6) == "  ▁▄██"
    assert draw_bars(RATES, 2.0, 6) == "  ▁▂▄▄"
    assert draw_bars([0.0] * 3, 0.0, 6) == "   "


def test_bars_of_many_steps_have_the_width() -> None:
    assert draw_bars([0.0] * 500 + [1.0] * 500, 1.0, 10) == " " * 5 + "█" * 5


def test_a_figure_is_well_formed_themed_and_has_the_same_bytes_every_time() -> None:
    text = draw_svg({"a < b": RATES, "head": [1.0] * 6}, "Rates & steps")
    assert text == draw_svg({"a < b": RATES, "head": [1.0] * 6}, "Rates & steps")
    root = ET.fromstring(text)
    paths = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("class") == "curve"]
    assert [path[0].text for path in paths] == ["a < b", "head"]
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("steps", [1, 5000])
def test_a_jump_from_0_is_drawn_upright_however_many_steps_there_are(steps: int) -> None:
    """Few points are drawn of many steps, and those beside the jump always are."""
    frozen = [0.0] * steps + [1.0] * steps
    path = draw_svg({"backbone": frozen}, "Rates").split('class="curve"')[1].split('d="')[1].split('"')[0]
    heights = [float(point.split()[1]) for point in path[1:].split("L")]
    assert len(heights) < 700
    assert heights == sorted(heights, reverse=True)
    xs = [float(point.split()[0]) for point in path[1:].split("L")]
    jump = next(index for index, height in enumerate(heights) if height != heights[0])
    assert xs[jump] - xs[jump - 1] == pytest.approx(628 / (2 * steps - 1), abs=0.11)
