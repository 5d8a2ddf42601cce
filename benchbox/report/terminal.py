"""The comparison table on a console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.quantities import counted
from benchbox.analysis.summary import MISSING
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
    """Print a run's table, its answer, its comparison and what failed. On a terminal only the brief columns are shown.

    Cells that have not run, as all others after `--only`, are counted and not listed.

    Raises:
        RecordError: the run or one of its records cannot be read.
    """
    store = RunStore(run_path)
    report = build_report(store.run(), store.records(), memory_limit=memory_limit)
    shown = [index for index, column in enumerate(report.table.columns) if column.brief or not console.is_terminal]
    columns = [report.table.columns[index] for index in shown]
    status = [column.name for column in report.table.columns].index("status")
    launched = [row for row in report.table.rows if row[status].text != MISSING]
    rows = [[_text(row[index], console) for index in shown] for row in launched]
    right = [column.name for column in columns if column.number]
    print_rows(console, [column.name for column in columns], rows, right=right)
    if report.walks:
        say(console)
        print_rows(console, report.walks.headers, [view.texts for view in report.walks.certificates])
        say(console, "* the highest throughput of the walk", style="dim")
        say(console, report.walks.summary, style="bold")
        for setup, batch, reference_batch, ratio, evidence in report.walks.best:
            say(console, f"{setup} at batch {batch}, over the reference at batch {reference_batch}: {ratio} ({evidence})")
    boxes = [box for box in report.answers if box.has_run]
    for box in boxes:
        say(console)
        for number, line in enumerate(box.lines):
            task = f"{box.task}: " if box.task and not number else ""
            say(console, f"{task}{line.text}", style=_ANSWER_STYLES[line.level])
    if boxes:
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
        if failure.status == MISSING:
            continue
        message = failure.message.splitlines()[0]
        say(console, f"{failure.status}: {failure.cell} ({failure.where or 'no launch'}): {message}", style="red")
    if missing := len(report.table.rows) - len(launched):
        say(console, f"{counted(missing, 'cell has', 'cells have')} not run", style="yellow")
    for cell, reason in report.skipped:
        say(console, f"skipped: {cell}: {reason}", style="dim")
    for note in [*report.table.notes, *report.phase_notes]:
        say(console, note, style="dim")
