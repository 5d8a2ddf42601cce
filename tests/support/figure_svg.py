"""Reading the SVG of figures as their readers see it: texts by position, bars by colour, and the points of curves."""

from __future__ import annotations

import re
from html import unescape
from typing import NamedTuple


class PlacedText(NamedTuple):
    """A text with the position of its baseline."""

    x: float
    y: float
    text: str


class DrawnBar(NamedTuple):
    """A bar with its colour, and the pattern of its hatch or an empty text."""

    colour: str
    hatch: str
    left: float
    right: float
    y: float


def placed_texts(svg: str) -> list[PlacedText]:
    """Return the texts from top to bottom, and from left to right in a line."""
    pattern = (
        r'<text style="[^"]*" (?:x="([\d.-]+)" y="([\d.-]+)"|transform="translate\(([\d.-]+) ([\d.-]+)\)")[^>]*>([^<]*)</text>'
    )
    texts = [
        PlacedText(float(x or line_x), float(y or line_y), unescape(text))
        for x, y, line_x, line_y, text in re.findall(pattern, svg)
    ]
    return sorted(texts, key=lambda text: (round(text.y), text.x))


def texts_of(svg: str) -> list[str]:
    """Return the texts as `placed_texts` orders them."""
    return [text.text for text in placed_texts(svg)]


def drawn_bars(svg: str) -> list[DrawnBar]:
    """Return the bars from top to bottom, and those of a line in the order in which they are drawn."""
    hatches = {
        key: (colour, re.sub(r"\s+", " ", lines))
        for key, colour, lines in re.findall(
            r'<pattern id="([^"]+)"[^>]*>\s*<rect [^>]*fill="var\(--(\w+)\)"/>\s*<path d="([^"]+)"', svg
        )
    }
    pattern = (
        r'<path d="([^"]+?z)\s*" style="fill: (?:var\(--(\w+)\)|url\(#([^)]+)\)); stroke: var\(--card\); stroke-width: 0.6'
    )
    bars = []
    for path, colour, key in re.findall(pattern, svg):
        points = numbers(path)
        drawn = hatches[key] if key else (colour, "")
        bars.append(DrawnBar(*drawn, min(points[0::2]), max(points[0::2]), min(points[1::2])))
    return sorted(bars, key=lambda bar: bar.y)


def curve_points(svg: str, colour: str) -> list[list[tuple[float, float]]]:
    """Return the points of the curve of a colour, a list for each part between gaps."""
    path, *_ = re.findall(  # those after it are in the legend
        rf'<path d="([^"]+)" style="fill: none; [^"]*stroke: var\(--{colour}\); stroke-width: 1.5', svg
    )
    parts = [numbers(part) for part in path.split("M") if part.strip()]
    return [list(zip(part[0::2], part[1::2], strict=True)) for part in parts]


def numbers(path: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path)]
