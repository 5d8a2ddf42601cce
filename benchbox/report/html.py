"""A report as one self-contained HTML file: no network, no fonts, readable without scripts."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from benchbox.report import charts, equivalence, ranks

if TYPE_CHECKING:
    from benchbox.report.view import Report

_TEMPLATES = Path(__file__).parent / "templates"


def render_html(report: Report) -> str:
    """Render the report as HTML. All input is escaped, and only our own script may run."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["n"] = format_coordinate
    style, script = ((_TEMPLATES / name).read_text(encoding="utf-8") for name in ("style.css", "sort.js"))
    return environment.get_template("report.html.j2").render(
        report=report,
        geometry=charts,
        equivalence=equivalence,
        ranks=ranks,
        # Our own files, not input: escaping would break them.
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def format_coordinate(value: float) -> str:
    """Return a coordinate of a drawing with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
