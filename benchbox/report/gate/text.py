"""A gate on a console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.report.rows import print_rows, say

if TYPE_CHECKING:
    from rich.console import Console

    from benchbox.report.gate.view import GateView

COLUMNS = ("cell", "metric", "expected", "found", "verdict")


def print_gate(view: GateView, console: Console) -> None:
    """Print every demand, and the notes on those that did not simply pass."""
    print_rows(console, COLUMNS, [(row.cell, row.metric, row.expected, row.actual, row.verdict) for row in view.rows])
    for note in view.notes:
        say(console, note)
    annotated = [row for row in view.rows if row.note]
    texts = (f"{row.note}" if row.verdict == "missing" or row.file else f"{row.cell}: {row.note}" for row in annotated)
    for text in dict.fromkeys(texts):
        say(console, f"note: {text}")
