"""A gate as workflow commands of GitHub Actions, which annotate thresholds in a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.report.gate.view import row_sentence
from benchbox.report.github import annotation

if TYPE_CHECKING:
    from benchbox.report.gate.view import GateView

_LEVELS = {"breach": "error", "missing": "error", "warning": "warning", "inconclusive": "notice", "accepted": "notice"}


def render_gate_github(view: GateView) -> str:
    """Render one annotation for every demand that did not simply pass, the worst first: GitHub shows ten."""
    lines = []
    for verdict, level in _LEVELS.items():
        for row in view.noted:
            if row.verdict == verdict:
                file, line = view.position(row)
                lines.append(annotation(level, f"{row.metric}: {verdict}", row_sentence(row), file=file, line=line))
    return "\n".join([*lines, view.summary]) + "\n"
