"""A comparison as one self-contained HTML file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.changes import UNSETTLED
from benchbox.report.comparison.view import COLUMNS, NO_DIFFERENCES, NUMBERS, method_sentence, row_texts, summary_sentences
from benchbox.report.html import render_template

if TYPE_CHECKING:
    from benchbox.analysis.changes import RunComparison


def render_html(comparison: RunComparison) -> str:
    """Render a comparison as HTML: what changed first, then what is not settled, then the rest."""
    groups = (
        ("changed", "What changed", comparison.of_verdict("regression", "improvement")),
        ("unsettled", "What is not settled", comparison.of_verdict(*UNSETTLED)),
        ("neutral", "What did not change", comparison.of_verdict("neutral")),
    )
    return render_template(
        "comparison.html.j2",
        title=f"{comparison.head} against {comparison.base}",
        sentences=summary_sentences(comparison),
        columns=[(name, name in NUMBERS) for name in COLUMNS],
        groups=[
            (key, title, [(row_texts(change), change.verdict, change.reason) for change in changes])
            for key, title, changes in groups
            if changes
        ],
        differences=comparison.differences,
        no_differences=NO_DIFFERENCES,
        method=method_sentence(comparison),
    )
