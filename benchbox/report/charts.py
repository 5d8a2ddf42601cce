"""Geometry of the charts: horizontal bars in groups, so that what is compared stands together. Units are SVG user units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HALF, FULL = 530.0, 1090.0  # widths: two charts side by side, one alone
CHARACTER = 7.4  # width to allow for one, generous for the font of the style sheet
GAP = 10.0  # between a bar and the name left and the value right of it
LONGEST_NAME, LONGEST_TEXT = 24, 26  # characters; what is longer is cut, and whole in the description
BAR_HEIGHT = 16.0
ROW_HEIGHT = 23.0
GROUP_HEAD = 26.0  # name of a group above its bars
AXIS_HEIGHT = 28.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a bar. `colour` names a colour of the style sheet: s0.. for series, p0.. for phases, rest for neither."""

    x: float
    width: float
    colour: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One cell. `y` is the top of the bar, `x` its left end, `whisker` the range over launches; without segments `text` says
    why.
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
        """Where the text begins."""
        ends = [self.x, *(segment.x + segment.width for segment in self.segments)]
        return max(max(ends), *self.whisker) if self.whisker else max(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    x: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Bars to be compared with one another. `y` is the baseline of its name."""

    y: float
    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend:
    colour: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart with everything placed. `notes` are sentences that must be read with it."""

    key: str
    title: str
    description: str
    groups: tuple[Group, ...]
    ticks: tuple[Tick, ...]
    width: float
    height: float
    legend: tuple[Legend, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A value to be drawn, in the unit of the chart."""

    value: float
    colour: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One cell to be drawn: pieces side by side, or (`layered`) one behind the other, the longest at the back."""

    group: str
    name: str
    pieces: tuple[Piece, ...]
    spread: tuple[float, float] | None
    text: str
    layered: bool = False


def chart(
    *,
    key: str,
    title: str,
    description: str,
    entries: Sequence[Entry],
    scale: float,
    width: float = HALF,
    legend: Sequence[Legend] = (),
    notes: Sequence[str] = (),
) -> Chart | None:
    """Place entries, keeping the order of groups. Ticks are labelled in values divided by `scale`; None when all are empty."""
    longest = max((max([_length(entry), *(entry.spread or ())]) for entry in entries if entry.pieces), default=0.0)
    if longest <= 0:
        return None
    left = _room((entry.name for entry in entries), LONGEST_NAME)
    per_unit = (width - left - _room((entry.text for entry in entries), LONGEST_TEXT)) / longest
    groups = []
    y = 0.0
    for name in dict.fromkeys(entry.group for entry in entries):
        head = y + GROUP_HEAD - 9 if name else y
        y += GROUP_HEAD if name else 6
        bars = []
        for entry in (entry for entry in entries if entry.group == name):
            bars.append(_bar(entry, left, y, per_unit))
            y += ROW_HEIGHT
        groups.append(Group(y=head, name=name, bars=tuple(bars)))
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


def _length(entry: Entry) -> float:
    values = [piece.value for piece in entry.pieces]
    return (max(values) if entry.layered else sum(values)) if values else 0.0


def _room(texts: Iterable[str], longest: int) -> float:
    return min(max(map(len, texts), default=0), longest) * CHARACTER + GAP


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _bar(entry: Entry, left: float, y: float, per_unit: float) -> Bar:
    segments = []
    x = left
    pieces = sorted(entry.pieces, key=lambda piece: -piece.value) if entry.layered else entry.pieces
    for piece in pieces:
        segments.append(Segment(x=x, width=piece.value * per_unit, colour=piece.colour, title=piece.title))
        if not entry.layered:
            x += piece.value * per_unit
    whisker = None
    if entry.spread is not None and entry.spread[0] < entry.spread[1]:
        whisker = (left + entry.spread[0] * per_unit, left + entry.spread[1] * per_unit)
    return Bar(x=left, y=y, name=entry.name, segments=tuple(segments), whisker=whisker, text=entry.text)


def nice_ticks(longest: float, about: int = 5) -> list[float]:
    """Round values from 0 up to `longest`, about so many, in steps of 1, 2 or 5 times a power of ten."""
    rough = longest / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(index * step, 12) for index in range(math.floor(longest / step + 1e-9) + 1)]
