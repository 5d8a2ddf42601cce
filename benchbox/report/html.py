"""A report as one self-contained HTML file: no network, no fonts, readable without scripts."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from benchbox import __version__
from benchbox.report import equivalence, ranks
from benchbox.report.embedded import card_data, compress_data, table_data, table_style
from benchbox.report.garbage_collection import paused_garbage_collection
from benchbox.report.unprintable import escape_lines

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.report.figures.drawing import Drawing
    from benchbox.report.view import Report

MAX_CARDS = 12  # pairs or tasks that are shown at once
_TEMPLATES = Path(__file__).parent / "templates"


@paused_garbage_collection()
def render_html(report: Report) -> str:
    """Render the report as HTML. Only our own script may run."""
    script = (_TEMPLATES / "cells.js").read_text(encoding="utf-8")
    return render_template(
        "report.html.j2",
        report=report,
        figures=page_figures(report.figures),
        equivalence=equivalence,
        ranks=ranks,
        MAX_CARDS=MAX_CARDS,
        table_data=compress_data(table_data(report)),
        card_data=compress_data(card_data(report)) if report.is_large else "",
        table_style=Markup(table_style(report)),  # noqa: S704  (names of columns are escaped there)
        script=Markup(script),  # noqa: S704  (our own file, not input: escaping would break it)
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _visible(value: Any) -> Any:
    """Escape what a text does not show, such as a mark that reverses the direction of what follows."""
    return escape_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def page_figures(drawings: Iterable[Drawing]) -> list[tuple[Drawing, Markup]]:
    """Draw figures as elements of a page."""
    return [(drawing, Markup(drawing.svg())) for drawing in drawings]  # noqa: S704  (matplotlib escapes texts)


def render_template(name: str, **values: Any) -> str:
    """Render a page of `templates/`, with the style and the version of benchbox that all pages have. All input is escaped."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((_TEMPLATES / "style.css").read_text(encoding="utf-8"))  # noqa: S704  (our own file, not input)
    return environment.get_template(name).render(style=style, version=__version__, **values)
