"""A comparison as workflow commands of GitHub Actions, which annotate the matrix file in a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.report.comparison.view import sentence, summary_sentences

if TYPE_CHECKING:
    from benchbox.analysis.changes import RunComparison

_LEVELS = {"regression": "error", "missing": "warning", "incomparable": "warning", "inconclusive": "notice"}


def render_github(comparison: RunComparison, matrix_file: str | None, line: int | None) -> str:
    """Render a comparison as one annotation for every figure that is worse or not settled, the worst first: GitHub shows ten.

    Args:
        matrix_file: path in the repository of the matrix that `head` ran; None: annotations without a place.
        line: of the axes in that file.

    The format is that of https://docs.github.com/actions/reference/workflow-commands-for-github-actions.
    """
    where = f"file={_escape_property(matrix_file)},line={line or 1}," if matrix_file else ""
    lines = [
        f"::{_LEVELS[change.verdict]} {where}title={_escape_property(f'{change.metric}: {change.verdict}')}::"
        + _escape(sentence(change))
        for verdict in _LEVELS
        for change in comparison.changes
        if change.verdict == verdict
    ]
    return "\n".join([*lines, *summary_sentences(comparison)]) + "\n"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
