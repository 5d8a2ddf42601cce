"""A comparison on a console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.quantities import counted
from benchbox.report.comparison.view import COLUMNS, NUMBERS, method_sentence, reasons, row_texts, summary_sentences
from benchbox.report.rows import print_rows, say

if TYPE_CHECKING:
    from rich.console import Console

    from benchbox.analysis.changes import RunComparison


def print_comparison(comparison: RunComparison, console: Console, *, everything: bool) -> None:
    """Print what changed and what is not settled, and the answer; with `everything` also figures that did not change."""
    shown = [change for change in comparison.changes if everything or change.verdict != "neutral"]
    if shown:
        print_rows(console, COLUMNS, [row_texts(change) for change in shown], right=NUMBERS)
    for reason in reasons(comparison):
        say(console, f"note: {reason}")
    if hidden := len(comparison.changes) - len(shown):
        say(console, f"{counted(hidden, 'figure')} did not change; --all lists {'it' if hidden == 1 else 'them'}", style="dim")
    for number, text in enumerate(summary_sentences(comparison)):
        say(console, text, style="" if number else "bold")
    say(console, method_sentence(comparison), style="dim")
