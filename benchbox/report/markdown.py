"""A report as Markdown, for pull requests and commits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchbox import __version__
from benchbox.launch.fingerprint import report_sha256
from benchbox.report import equivalence, ranks
from benchbox.report.unprintable import escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from benchbox.report.view import Report, Table
    from benchbox.report.walks import WalkSection


MAX_CHARACTERS = 65_536  # of a file or a comment that GitHub shows
_MOST_ROWS = (None, 200, 100, 50, 25, 10, 5)  # of a table or list, until all of it fits
_SUMMARY_ENTRIES = 8


def render_markdown(report: Report) -> str:
    """Render the report as GitHub-flavoured Markdown, with tables cut to what GitHub shows. Input text is escaped."""
    texts = ("\n".join(_lines(report, most)) + "\n" for most in _MOST_ROWS)
    text = ""
    for text in texts:
        if len(text) < MAX_CHARACTERS:
            break
    return text


def render_tables(walks: WalkSection | None, table: Table) -> str:
    """Render the sections of largest batches and of cells as they are in the whole report, with all rows and without notes."""
    return "\n".join([*(_walk_lines(walks, None) if walks else ()), *_cell_lines(table, None)])


def render_summary(report: Report) -> str:
    """Render the answer, what did not run and the worst findings as Markdown of a page, for the summary of a CI job."""
    return "\n".join(_summary_lines(report)) + "\n"


def _summary_lines(report: Report) -> Iterator[str]:
    yield from _head_lines(report)
    yield from _answer_lines(report, _SUMMARY_ENTRIES)
    if report.headline.cards:
        yield from ("", *(f"**{escape(sentence)}**" for sentence in report.headline.sentences))
    if report.failure_groups:
        yield from ("", "### What did not run", "")
        failures = [f"- {escape(f.cell)}: {f.status}, {escape(f.message)}" for f in report.failure_groups]
        yield from _cut(failures, _SUMMARY_ENTRIES)
    severe = [finding for finding in report.findings if finding.severity != "info"]
    if severe:
        yield from ("", "### Precision", "")
        yield from _cut([f"- {f.code} {f.severity}: {escape(f.title)}" for f in severe], _SUMMARY_ENTRIES)


def _cut(lines: Sequence[str], most: int | None) -> Iterator[str]:
    """Yield at most so many lines, and how many more there are."""
    yield from lines[:most]
    if most is not None and len(lines) > most:
        yield from ("", f"{len(lines) - most} more: report.html and table.csv have all of them.")


def _head_lines(report: Report) -> Iterator[str]:
    yield f"# {escape(report.title)}"
    yield ""
    yield f"{escape(report.summary)} " + ", ".join(f"{count} {name}" for name, count in report.counts) + "."
    yield ""
    yield "In all cells: " + ", ".join(f"{escape(name)} {escape(value)}" for name, value in report.fixed) + "."


def _answer_lines(report: Report, most: int | None) -> Iterator[str]:
    for box in report.answers[:most]:
        yield from ("", *([f"**{escape(box.task)}**", ""] if box.task else []))
        yield from (f"- {escape(line.text)}" for line in box.lines)
    if most is not None and len(report.answers) > most:
        yield from ("", f"{len(report.answers) - most} more tasks: report.html has their answers.")


def _lines(report: Report, most: int | None) -> Iterator[str]:
    yield from _head_lines(report)
    yield from _answer_lines(report, most)
    headline = report.headline
    if headline.cards:
        yield from ("", *(f"**{escape(sentence)}**" for sentence in headline.sentences), "", headline.compared, "")
        cards = [
            f"- **{card.ratio}** {'; '.join(escape(text) for text in (card.sentence, card.context) if text)} ({card.evidence})"
            for card in headline.cards
        ]
        yield from _cut(cards, most)
    if headline.refused:
        yield from ("", "Not compared with the reference:", "")
        yield from _cut([f"- {escape(reason)}" for reason in headline.refused], most)
    for drawing in report.overview_figures:
        yield from ("", f"![{escape(drawing.title)}](figures/{drawing.key}.svg)")
    if report.walks:
        yield from _walk_lines(report.walks, most)
    yield from _cell_lines(report.table, most)
    for note in [*report.table.notes, *report.phase_notes]:
        yield from ("", escape(note))
    if report.equivalence:
        yield from ("", "## Equivalence", "", f"{report.equivalence.summary} {equivalence.NOTE}", "")
        yield from table_lines(equivalence.HEADERS, [row.texts for row in report.equivalence.rows], most=most)
    if report.ranks and report.ranks.sentences:
        yield from ("", "## Ranks", "", ranks.NOTE, "")
        yield from _cut([f"- {escape(sentence)}" for sentence in report.ranks.sentences], most)
    if report.failures or report.skipped:
        yield from ("", "## What did not run", "")
        rows = [[failure.cell, failure.status, failure.where, failure.message] for failure in report.failures]
        rows += [[cell, "skipped", "when planned", reason] for cell, reason in report.skipped]
        yield from table_lines(["cell", "status", "where", "why"], rows, most=most)
        for failure in [failure for failure in report.failures if failure.ranks][:most]:
            yield from ("", escape(f"{failure.cell}, {failure.where}: {failure.status}. The ranks:"), "")
            yield from (f"    {line}" for line in failure.ranks.splitlines())
    if report.theory:
        yield from ("", "## Theory", "", escape(report.theory.text), "")
        yield from table_lines(report.theory.headers, report.theory.rows, most=most)
    if report.findings:
        yield from ("", "## Precision", "")
        rows = [[f.code, f.severity, f.title, "; ".join(f.cell_lines), f.repair] for f in report.findings]
        yield from table_lines(["rule", "severity", "finding", "cells", "repair"], rows, most=most)
    yield from ("", "## Method", "", escape(report.sampling), "")
    method = [[metric.name, metric.formula, metric.launches, metric.unit, metric.better] for metric in report.method]
    yield from table_lines(["metric", "of one launch", "of a cell", "unit", "better"], method, most=most)
    if report.differences:
        yield from ("", "## Environment differences", "", escape(report.differences.summary))
        if report.differences.mixed:
            yield from ("", f"**Launches of one cell differ in {escape(', '.join(report.differences.mixed))}.**")
        if report.differences.rows:
            yield ""
            yield from table_lines(report.differences.headers, report.differences.rows, most=most)
    if report.environment:
        yield from ("", "## Environment", "")
        yield from table_lines(["", ""], [list(entry) for entry in report.environment], most=most)
    if report.chain_head:
        yield from ("", f"Head of the chain of plan and records: {report.chain_head}")
    yield from ("", sources_line())


def sources_line() -> str:
    """Return the last line of a report, which names the sources of benchbox that rendered it."""
    return f"Rendered by benchbox {__version__}, sources {report_sha256()}"


def _walk_lines(walks: WalkSection, most: int | None) -> Iterator[str]:
    yield from ("", "## Largest batches", "", escape(walks.summary), "")
    yield from table_lines(walks.headers, [view.texts for view in walks.certificates], most=most)
    for note in ("* the highest throughput of the walk", *walks.notes):
        yield from ("", escape(note))
    if walks.best:
        yield from ("", escape(walks.best_note), "")
        yield from table_lines(walks.best_headers, walks.best, most=most)


def _cell_lines(table: Table, most: int | None) -> Iterator[str]:
    yield from ("", "## Cells", "")
    yield from table_lines(
        [column.name for column in table.columns],
        [[value.line for value in row] for row in table.rows],
        right=[column.name for column in table.columns if column.number],
        most=most,
    )


def table_lines(
    headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = (), most: int | None = None
) -> Iterator[str]:
    """Yield the lines of a Markdown table; columns named in `right` are right-aligned. Texts are escaped.

    Of more than `most` rows, yields the first and a line on the others.
    """
    yield "| " + " | ".join(escape(header) for header in headers) + " |"
    yield "|" + "|".join("---:" if header in right else "---" for header in headers) + "|"
    yield from _cut(["| " + " | ".join(escape(text) for text in row) + " |" for row in rows], most)


def escape(text: str) -> str:
    """Escape text so that Markdown shows it literally, in one line, and no sequence of it controls a terminal."""
    return re.sub(r"([\\`*_\[\]<>|~])", r"\\\1", escape_unprintable(" ".join(text.split())))
