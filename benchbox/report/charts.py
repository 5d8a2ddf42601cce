"""Geometry of the charts: horizontal bars in groups of cells to compare. Units are SVG user units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HALF, FULL = 530.0, 1090.0  # widths: two charts side by side, one alone
CHARACTER = 7.8  # width of a character, generous for the font of the style sheet
GAP = 10.0  # between a bar and the texts on both sides of it
LONGEST_NAME, LONGEST_TEXT = 24, 26  # characters; longer texts are cut, and complete in the description
BAR_HEIGHT = 16.0
ROW_HEIGHT = 23.0
GROUP_HEAD = 26.0  # height of the name above the bars of a group
AXIS_HEIGHT = 28.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Part of a bar. `colour` names a colour of the style sheet: s0.. for series, p0.. for phases, rest for neither."""

    x: float
    width: float
    colour: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Bar of one cell. `y` is its top, `x` its left end, `whisker` the range over launches.

    `text` is the value, or the reason why there are no segments.
    """

    x: float
    y: float
    name: str
    segments: tuple[Segment, ...]
    whisker: tuple[float, float] | None
    text: str

    @property
    def short_name(self) -> str:
        return _cut(self.name, LONGEST_NAME)

    @property
    def short_text(self) -> str:
        return _cut(self.text, LONGEST_TEXT)

    @property
    def end(self) -> float:
        """Position of the text."""
        ends = [self.x, *(segment.x + segment.width for segment in self.segments)]
        return max(max(ends), *self.whisker) if self.whisker else max(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    x: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarGroup:
    """Bars to compare with one another. `y` is the text baseline of the group's name."""

    y: float
    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendEntry:
    colour: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart whose parts have their positions. `notes` are sentences that must be read with it."""

    key: str
    title: str
    description: str
    groups: tuple[BarGroup, ...]
    ticks: tuple[Tick, ...]
    width: float
    height: float
    legend: tuple[LegendEntry, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """A value to draw, in the unit of the chart."""

    value: float
    colour: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarData:
    """One cell to draw: parts side by side, or (`layered`) one behind the other, the longest at the back."""

    group: str
    name: str
    parts: tuple[BarPart, ...]
    spread: tuple[float, float] | None
    text: str
    layered: bool = False


def layout_chart(
    *,
    key: str,
    title: str,
    description: str,
    entries: Sequence[BarData],
    scale: float,
    width: float = HALF,
    legend: Sequence[LegendEntry] = (),
    notes: Sequence[str] = (),
) -> Chart | None:
    """Lay out the entries, keeping the order of groups. Tick labels are values divided by `scale`; None when all are empty."""
    longest = max((max([_length(entry), *(entry.spread or ())]) for entry in entries if entry.parts), default=0.0)
    if longest <= 0:
        return None
    left = _text_width((entry.name for entry in entries), LONGEST_NAME)
    per_unit = (width - left - _text_width((entry.text for entry in entries), LONGEST_TEXT)) / longest
    groups = []
    y = 0.0
    members: dict[str, list[BarData]] = {}
    for entry in entries:
        members.setdefault(entry.group, []).append(entry)
    for name, group in members.items():
        head = y + GROUP_HEAD - 9 if name else y
        y += GROUP_HEAD if name else 6
        bars = []
        for entry in group:
            bars.append(_bar(entry, left, y, per_unit))
            y += ROW_HEIGHT
        groups.append(BarGroup(y=head, name=name, bars=tuple(bars)))
    ticks = [Tick(x=left + tick * scale * per_unit, text=f"{tick:g}") for tick in nice_ticks(longest / scale)]
    return Chart(
        key=key,
        title=title,
        description=description,
        groups=tuple(groups),
        ticks=tuple(ticks),
        width=width,
        height=y + AXIS_HEIGHT,
        legend=tuple(legend),
        notes=tuple(notes),
    )


def _length(entry: BarData) -> float:
    values = [part.value for part in entry.parts]
    return (max(values) if entry.layered else sum(values)) if values else 0.0


def _text_width(texts: Iterable[str], longest: int) -> float:
    return min(max(map(len, texts), default=0), longest) * CHARACTER + GAP


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _bar(entry: BarData, left: float, y: float, per_unit: float) -> Bar:
    segments = []
    x = left
    parts = sorted(entry.parts, key=lambda part: -part.value) if entry.layered else entry.parts
    for part in parts:
        segments.append(Segment(x=x, width=part.value * per_unit, colour=part.colour, title=part.title))
        if not entry.layered:
            x += part.value * per_unit
    whisker = None
    if entry.spread is not None and entry.spread[0] < entry.spread[1]:
        whisker = (left + entry.spread[0] * per_unit, left + entry.spread[1] * per_unit)
    return Bar(x=left, y=y, name=entry.name, segments=tuple(segments), whisker=whisker, text=entry.text)


def nice_ticks(longest: float, count: int = 5) -> list[float]:
    """Return about `count` round values from 0 up to `longest`, in steps of 1, 2 or 5 times a power of ten."""
    rough = longest / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(index * step, 12) for index in range(math.floor(longest / step + 1e-9) + 1)]
