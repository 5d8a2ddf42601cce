"""Extents of the texts of a figure: which are cut off, or lie upon another panel or text."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from benchbox.report.figures.drawing import PRINT
from benchbox.report.figures.svg import settings

if TYPE_CHECKING:
    import pytest
    from matplotlib.figure import Figure

    from benchbox.report.figures.drawing import Drawing

_TOLERANCE = 1.0  # pixel


def misplaced_texts(drawing: Drawing, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a message for every text that is drawn beyond the edge of its figure, or upon another panel or text."""
    with settings(drawing.key):
        figure = drawing.draw(PRINT)
        canvas = FigureCanvasAgg(figure)
        texts = _drawn_texts(figure, monkeypatch)
        renderer = canvas.get_renderer()
        extents = [(text, text.get_window_extent(renderer)) for text in texts]
    problems = []
    for text, extent in extents:
        beyond = max(
            figure.bbox.x0 - extent.x0, extent.x1 - figure.bbox.x1, figure.bbox.y0 - extent.y0, extent.y1 - figure.bbox.y1
        )
        if beyond > _TOLERANCE:
            problems.append(f"{text.get_text()!r} is {beyond:.0f} pixels beyond the edge")
        problems += [
            f"{text.get_text()!r} is upon another panel"
            for panel in figure.axes
            if text.axes not in (None, panel) and panel.axison and _overlap(extent, panel.get_window_extent())
        ]
    problems += [
        f"{text.get_text()!r} is upon {other.get_text()!r}"
        for (text, extent), (other, other_extent) in combinations(extents, 2)
        if _overlap(extent, other_extent)
    ]
    return problems


def _drawn_texts(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """Return the texts that are drawn: not the labels of ticks beyond the limits of an axis."""
    texts: list[Text] = []
    draw = Text.draw
    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", lambda text, renderer: (texts.append(text), draw(text, renderer)))
        figure.draw_without_rendering()
    return list(dict.fromkeys(text for text in texts if text.get_visible() and text.get_text().strip()))


def _overlap(extent, other) -> bool:  # type: ignore[no-untyped-def]
    width = min(extent.x1, other.x1) - max(extent.x0, other.x0)
    height = min(extent.y1, other.y1) - max(extent.y0, other.y0)
    return bool(min(width, height) > _TOLERANCE)
