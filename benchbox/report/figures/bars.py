"""Horizontal bars in groups of cells to compare, each with its value as text beside it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from benchbox.report.figures.drawing import HALF, HATCHES, WIDE, Drawing, add_legend, legend_columns, new_figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.figure import Figure

    from benchbox.report.figures.drawing import Palette, Section

ROW = 0.22  # height of a bar with the gap below it, in inches
NAME_WIDTH = 26  # characters in a line of a name


class BarPart(NamedTuple):
    """A part of a bar, in the unit of the axis. `colour` is a name of `Palette.named`."""

    name: str
    value: float
    colour: str
    text: str  # the value with its unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of a cell: parts side by side, or of layered bars one behind the other, the longest at the back.

    `text` is the value, or the reason why there are no parts. `spread` is the range over launches.
    """

    group: str
    name: str
    parts: tuple[BarPart, ...]
    text: str
    spread: tuple[float, float] | None = None


def bar_drawing(
    bars: Sequence[Bar],
    *,
    key: str,
    title: str,
    description: str,
    section: Section = "charts",
    is_layered: bool = False,
    is_wide: bool = False,
    legend: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
) -> Iterator[Drawing]:
    """Yield the figure of the bars, keeping the order of groups; nothing when all bars are empty.

    Args:
        title: with the unit, also below the axis.
        legend: names of parts with their colours.
    """
    order = list(dict.fromkeys(bar.group for bar in bars))
    bars = sorted(bars, key=lambda bar: order.index(bar.group))
    if any(part.value > 0 for bar in bars for part in bar.parts):
        yield Drawing(
            key=key,
            title=title,
            description=description,
            draw=partial(_draw, bars, title, WIDE if is_wide else HALF, legend, is_layered),
            section=section,
            is_wide=is_wide,
            values=" ".join(map(_bar_text, bars)),
            notes=tuple(notes),
        )


def _bar_text(bar: Bar) -> str:
    named = ", ".join(f"{part.name} {part.text}" for part in bar.parts) if len(bar.parts) > 1 else ""
    return f"{bar.group} {bar.name}: {bar.text}{f' ({named})' if named else ''}.".lstrip()


def _draw(
    bars: Sequence[Bar], label: str, width: float, legend: Sequence[tuple[str, str]], is_layered: bool, palette: Palette
) -> Figure:
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.transforms import blended_transform_factory

    positions, names, headings = [], [], []
    bottom = 0.0  # in heights of a bar
    for group, members in groupby(bars, key=lambda bar: bar.group):
        bottom += 0.3 if bottom and group else 0.1
        for line in textwrap.wrap(group, int(13 * width)):
            headings.append((bottom + 0.65, line))
            bottom += 0.85
        for bar in members:
            names.append(textwrap.fill(bar.name, NAME_WIDTH, break_on_hyphens=False))
            height = max(1.0, 0.75 * (names[-1].count("\n") + 1))
            positions.append(bottom + height / 2)
            bottom += height
    legend_rows = -(-len(legend) // legend_columns([name for name, _ in legend], width)) if legend else 0
    figure, (panel,) = new_figure(palette, size=(width, 0.55 + 0.22 * legend_rows + ROW * bottom))
    longest = 0.0
    for bar, position in zip(bars, positions, strict=True):
        end = 0.0
        for part in sorted(bar.parts, key=lambda part: -part.value) if is_layered else bar.parts:
            rectangle = Rectangle(  # panel.barh takes a quarter more time for 40 cells
                (0 if is_layered else end, position - 0.36),
                part.value,
                0.72,
                facecolor=palette.named(part.colour),
                edgecolor=palette.card,
                hatch=HATCHES.get(part.colour),
                linewidth=0.6,
                clip_on=False,
            )
            rectangle.set_in_layout(False)
            panel.add_artist(rectangle)
            end = max(end, part.value) if is_layered else end + part.value
        if bar.spread is not None and bar.spread[0] < bar.spread[1]:
            panel.plot(bar.spread, (position, position), color=palette.ink, linewidth=1.2, marker="|", clip_on=False)
            end = max(end, bar.spread[1])
        panel.annotate(  # outside the panel where the bar is long: the layout leaves room for it
            bar.text,
            (end, position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center_baseline",
            fontsize=8,
            color=palette.ink if bar.parts else palette.bad,
            annotation_clip=False,
        )
        longest = max(longest, end)
    for position, line in headings:
        placed = blended_transform_factory(figure.transFigure, panel.transData)
        heading = panel.text(0.008, position, line, transform=placed, fontsize=8, fontweight="bold", color=palette.ink)
        heading.set_in_layout(False)
    panel.grid(axis="y", visible=False)
    panel.set_yticks(positions, names, fontsize=8, color=palette.ink)
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize=8)
    panel.ticklabel_format(axis="x", style="plain", useOffset=False)
    panel.set_xlim(0, longest)
    panel.set_ylim(bottom + 0.1, 0)
    panel.set_xlabel(label, color=palette.soft, fontsize=8)
    if legend:
        handles = [
            Patch(facecolor=palette.named(colour), edgecolor=palette.card, hatch=HATCHES.get(colour), label=name)
            for name, colour in legend
        ]
        add_legend(figure, palette, handles)
    return figure
