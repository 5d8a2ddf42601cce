"""A comparison as workflow commands of GitHub Actions, which annotate the matrix file in a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.report.comparison.view import sentence, summary_sentences
from benchbox.report.github import annotation

if TYPE_CHECKING:
    from benchbox.analysis.changes import RunComparison

_LEVELS = {"regression": "error", "missing": "warning", "incomparable": "warning", "inconclusive": "notice"}


def render_github(comparison: RunComparison, matrix_file: str | None, line: int | None) -> str:
    """Render a comparison as one annotation for every figure that is worse or not settled, the worst first: GitHub shows ten.

    Args:
        matrix_file: path in the repository of the matrix that `head` ran; None: annotations without a place.
        line: of the axes in that file.
    """
    lines = [
        annotation(level, f"{change.metric}: {verdict}", sentence(change), file=matrix_file, line=line)
        for verdict, level in _LEVELS.items()
        for change in comparison.changes
        if change.verdict == verdict
    ]
    return "\n".join([*lines, *summary_sentences(comparison)]) + "\n"
