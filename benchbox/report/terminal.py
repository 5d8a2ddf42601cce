"""The comparison table on a console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.report.equivalence import HEADERS
from benchbox.report.rows import print_rows, say
from benchbox.report.view import build_report
from benchbox.store.run import RunStore

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console

    from benchbox.report.columns import CellValue


_ANSWER_STYLES: Mapping[str, str] = {"ok": "bold", "warning": "yellow", "bad": "bold red"}


def _text(value: CellValue, console: Console) -> str:
    return f"{value.text}\n{value.detail}".rstrip() if console.is_terminal else value.line


def print_table(run_path: Path, console: Console, *, memory_limit: int | None = None) -> None:
    """Print a run's table, its answer, its comparison and what did not run. On a terminal only the brief columns are shown.

    Raises:
        RecordError: the run or one of its records cannot be read.
    """
    store = RunStore(run_path)
    report = build_report(store.run(), store.records(), memory_limit=memory_limit)
    shown = [index for index, column in enumerate(report.table.columns) if column.brief or not console.is_terminal]
    columns = [report.table.columns[index] for index in shown]
    rows = [[_text(row[index], console) for index in shown] for row in report.table.rows]
    right = [column.name for column in columns if column.number]
    print_rows(console, [column.name for column in columns], rows, right=right)
    if report.walks:
        say(console)
        print_rows(console, report.walks.headers, [view.texts for view in report.walks.certificates])
        say(console, "* the highest throughput of the walk", style="dim")
        say(console, report.walks.summary, style="bold")
        for setup, batch, reference_batch, ratio, evidence in report.walks.best:
            say(console, f"{setup} at batch {batch}, over the reference at batch {reference_batch}: {ratio} ({evidence})")
    for box in report.answers:
        say(console)
        for number, line in enumerate(box.lines):
            task = f"{box.task}: " if box.task and not number else ""
            say(console, f"{task}{line.text}", style=_ANSWER_STYLES[line.level])
    if report.answers:
        say(console)
    for sentence in report.headline.sentences:
        say(console, sentence, style="bold")
    if report.equivalence:
        say(console, f"Equivalence: {report.equivalence.summary}", style="bold")
        if brief := report.equivalence.brief_rows:
            print_rows(console, HEADERS, [row.texts for row in brief])
    for sentence in report.ranks.sentences if report.ranks else ():
        say(console, f"Ranks: {sentence}")
    for failure in report.failures:
        message = failure.message.splitlines()[0]
        say(console, f"{failure.status}: {failure.cell} ({failure.where or 'no launch'}): {message}", style="red")
    for cell, reason in report.skipped:
        say(console, f"skipped: {cell}: {reason}", style="dim")
    for note in [*report.table.notes, *report.phase_notes]:
        say(console, note, style="dim")
