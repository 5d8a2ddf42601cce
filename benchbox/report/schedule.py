"""Learning rates over the steps of a training, as text and as an SVG figure. The same rates give the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.report.figures.curves import Curve, curve_drawing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def draw_bars(rates: Sequence[float], highest: float, width: int) -> str:
    """Draw rates as one line of block characters, a full block for `highest`. A rate above 0 is never blank."""
    columns = min(width, len(rates))
    if highest <= 0:
        return _BLOCKS[0] * columns
    sampled = [rates[index * len(rates) // columns] for index in range(columns)]
    return "".join(_BLOCKS[0 if rate <= 0 else max(1, round(rate / highest * (len(_BLOCKS) - 1)))] for rate in sampled)


def draw_svg(rates: Mapping[str, Sequence[float]], title: str) -> str:
    """Draw the rates of every step by the name of their curve, as a complete SVG file for light and dark pages."""
    curves = [Curve(name, range(len(values)), values) for name, values in rates.items()]
    description = "Learning rate of every parameter group over the steps of the training."
    drawing = curve_drawing(
        curves,
        key="schedule",
        title=title,
        description=description,
        section="trainings",
        is_wide=True,
        label="learning rate",
    )
    return drawing.themed_svg()
