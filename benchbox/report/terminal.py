"""The comparison table on a console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.report.rows import print_rows, say
from benchbox.report.view import build
from benchbox.store.run import RunStore

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from benchbox.report.columns import Value


def _text(value: Value, console: Console) -> str:
    return f"{value.text}\n{value.detail}".rstrip() if console.is_terminal else value.line


def print_table(run_path: Path, console: Console) -> None:
    """Print a run's table, what the comparison shows, and what did not run. A terminal gets the columns it has room for.

    Raises:
        RecordError: the run or one of its records cannot be read.
    """
    store = RunStore(run_path)
    report = build(store.run(), store.records())
    shown = [index for index, column in enumerate(report.table.columns) if column.brief or not console.is_terminal]
    columns = [report.table.columns[index] for index in shown]
    rows = [[_text(row[index], console) for index in shown] for row in report.table.rows]
    right = [column.name for column in columns if column.number]
    print_rows(console, [column.name for column in columns], rows, right=right)
    for sentence in report.headline.sentences:
        say(console, sentence, style="bold")
    for trouble in report.troubles:
        first = trouble.message.splitlines()[0]
        say(console, f"{trouble.status}: {trouble.cell} ({trouble.where or 'no launch'}): {first}", style="red")
    for cell, reason in report.skipped:
        say(console, f"skipped: {cell}: {reason}", style="dim")
    for note in report.table.notes:
        say(console, note, style="dim")
