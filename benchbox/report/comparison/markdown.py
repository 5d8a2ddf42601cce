"""A comparison as Markdown, for pull requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.changes import UNSETTLED
from benchbox.analysis.quantities import counted
from benchbox.report.comparison.view import COLUMNS, NUMBERS, method_sentence, row_texts, summary_sentences
from benchbox.report.markdown import escape, table_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.analysis.changes import Change, RunComparison

MAX_BYTES = 65_000  # GitHub refuses comments of more than 65,536 characters


def render_markdown(comparison: RunComparison) -> str:
    """Render a comparison as GitHub-flavoured Markdown, with the tables that fit into a comment. Input text is escaped."""
    lines: list[str] = []
    size, in_details = 0, False
    for line in _lines(comparison):
        size += len(line.encode()) + 1
        if size > MAX_BYTES:
            lines += ["", "</details>"] if in_details else []
            lines += ["", "The rest does not fit into a comment: `benchbox compare` prints it."]
            break
        in_details = line.startswith("<details>") or (in_details and line != "</details>")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _lines(comparison: RunComparison) -> Iterator[str]:
    first, *others = summary_sentences(comparison)
    yield from (f"**{escape(first)}**", "", *(f"{escape(text)}\n" for text in others))
    settled = comparison.of_verdict("regression", "improvement")
    unsettled = comparison.of_verdict(*UNSETTLED)
    for title, changes in (("Changes", settled), ("Not settled", unsettled)):
        if changes:
            yield from (f"### {title}", "", *_table(changes), "")
            yield from (f"- {escape(reason)}" for reason in dict.fromkeys(change.reason for change in changes) if reason)
            yield ""
    if neutral := comparison.of_verdict("neutral"):
        summary = f"<details><summary>{counted(len(neutral), 'figure')} did not change</summary>"
        yield from (summary, "", *_table(neutral), "", "</details>", "")
    yield escape(method_sentence(comparison))


def _table(changes: list[Change]) -> Iterator[str]:
    return table_lines(COLUMNS, [row_texts(change) for change in changes], right=NUMBERS)
