"""A report as Markdown, for pull requests and commits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchbox.report import equivalence, ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from benchbox.report.view import Report


def render_markdown(report: Report) -> str:
    """Render the report as GitHub-flavoured Markdown. Input text is escaped."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {escape(report.title)}"
    yield ""
    yield f"{escape(report.summary)} " + ", ".join(f"{count} {name}" for name, count in report.counts) + "."
    yield ""
    yield "In all cells: " + ", ".join(f"{escape(name)} {escape(value)}" for name, value in report.fixed) + "."
    for box in report.answers:
        yield from ("", *([f"**{escape(box.task)}**", ""] if box.task else []))
        yield from (f"- {escape(line.text)}" for line in box.lines)
    headline = report.headline
    if headline.cards:
        yield from ("", *(f"**{escape(sentence)}**" for sentence in headline.sentences), "", headline.compared, "")
        for card in headline.cards:
            yield f"- **{card.ratio}** {escape(card.sentence)}; {escape(card.context)} ({card.evidence})"
    if headline.refused:
        yield from ("", "Not compared with the reference:", "", *(f"- {escape(reason)}" for reason in headline.refused))
    if report.walks:
        yield from ("", "## Largest batches", "", escape(report.walks.summary), "")
        yield from table_lines(report.walks.headers, [view.texts for view in report.walks.certificates])
        for note in ("* the highest throughput of the walk", *report.walks.notes):
            yield from ("", escape(note))
        if report.walks.best:
            yield from ("", escape(report.walks.best_note), "")
            yield from table_lines(report.walks.best_headers, report.walks.best)
    yield from ("", "## Cells", "")
    columns = report.table.columns
    yield from table_lines(
        [column.name for column in columns],
        [[value.line for value in row] for row in report.table.rows],
        right=[column.name for column in columns if column.number],
    )
    for note in [*report.table.notes, *(note for chart in report.charts for note in chart.notes if chart.key == "phases")]:
        yield from ("", escape(note))
    if report.equivalence:
        yield from ("", "## Equivalence", "", f"{report.equivalence.summary} {equivalence.NOTE}", "")
        yield from table_lines(equivalence.HEADERS, [row.texts for row in report.equivalence.rows])
    if report.ranks and report.ranks.sentences:
        yield from ("", "## Ranks", "", ranks.NOTE, "", *(f"- {escape(sentence)}" for sentence in report.ranks.sentences))
    if report.failures or report.skipped:
        yield from ("", "## What did not run", "")
        rows = [[failure.cell, failure.status, failure.where, failure.message] for failure in report.failures]
        rows += [[cell, "skipped", "when planned", reason] for cell, reason in report.skipped]
        yield from table_lines(["cell", "status", "where", "why"], rows)
        for failure in (failure for failure in report.failures if failure.ranks):
            yield from ("", escape(f"{failure.cell}, {failure.where}: {failure.status}. The ranks:"), "")
            yield from (f"    {line}" for line in failure.ranks.splitlines())
    if report.theory:
        yield from ("", "## Theory", "", f"{escape(report.theory.note)} {escape(report.theory.counts)}.", "")
        yield from table_lines(report.theory.headers, report.theory.rows)
    if report.findings:
        yield from ("", "## Precision", "")
        rows = [[f.code, f.severity, f.title, "; ".join(f.cell_lines), f.repair] for f in report.findings]
        yield from table_lines(["rule", "severity", "finding", "cells", "repair"], rows)
    yield from ("", "## Method", "", escape(report.sampling), "")
    method = [[metric.name, metric.formula, metric.launches, metric.unit, metric.better] for metric in report.method]
    yield from table_lines(["metric", "of one launch", "of a cell", "unit", "better"], method)
    if report.environment:
        yield from ("", "## Environment", "")
        yield from table_lines(["", ""], [list(entry) for entry in report.environment])
    if report.chain_head:
        yield from ("", f"Head of the chain of plan and records: {report.chain_head}")


def table_lines(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a Markdown table; columns named in `right` are right-aligned. Texts are escaped."""
    yield "| " + " | ".join(escape(header) for header in headers) + " |"
    yield "|" + "|".join("---:" if header in right else "---" for header in headers) + "|"
    for row in rows:
        yield "| " + " | ".join(escape(text) for text in row) + " |"


def escape(text: str) -> str:
    """Escape text so that Markdown shows it literally, in one line."""
    return re.sub(r"([\\`*_\[\]<>|~])", r"\\\1", " ".join(text.split()))
