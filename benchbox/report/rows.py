"""Rows of text on a console: a table on a terminal, aligned lines that are never cut elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from benchbox.report.unprintable import escape_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

_STYLES: Mapping[str, str] = {
    "ok": "green",
    "held": "green",
    "breach": "bold red",
    "violated": "bold red",
    "missing": "yellow",
    "warning": "yellow",
    "equivalent": "green",
    "diverged": "bold red",
}


def print_rows(console: Console, headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows under headers; columns named in `right` are right-aligned. Verdicts (ok, breach, ...) are coloured.

    Text is never interpreted as markup, nor by the terminal: a policy may be called `[red]`.
    """
    rows = [[escape_lines(text) for text in row] for row in rows]
    if console.is_terminal:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for header in headers:
            heading = header.replace(" ", "\n")  # headers are wider than their columns
            table.add_column(Text(heading), justify="right" if header in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in row))
        console.print(table)
        return
    widths = [max(len(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    for row in [headers, *rows]:
        cells = (
            text.rjust(width) if header in right else text.ljust(width)
            for text, width, header in zip(row, widths, headers, strict=True)
        )
        say(console, "  ".join(cells).rstrip())


def say(console: Console, line: str = "", style: str = "") -> None:
    """Print one line literally: no markup, no highlighting, no control characters, and no wrapping unless on a terminal."""
    console.print(Text(escape_lines(line), style=style), soft_wrap=not console.is_terminal)
