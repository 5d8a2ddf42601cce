"""A comparison as SARIF 2.1.0: a rule for each metric, and a result for each figure that is worse or not settled."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchbox.report.comparison.view import sentence
from benchbox.report.sarif import fingerprint, line_location, metric_rules, sarif_log
from benchbox.report.unprintable import escape_unprintable

if TYPE_CHECKING:
    from benchbox.analysis.changes import Change, RunComparison

_LEVELS = {"regression": "error", "missing": "warning", "incomparable": "warning", "inconclusive": "note"}


def render_sarif(comparison: RunComparison, matrix_file: str | None, line: int | None) -> str:
    """Render a comparison as a SARIF log with one run.

    Args:
        matrix_file: path in the repository of the matrix that `head` ran; None: results without a file.
        line: of the axes in that file.
    """
    names = list(dict.fromkeys(change.metric for change in comparison.changes))
    worse = comparison.of_verdict(*_LEVELS)  # type: ignore[arg-type]
    log = sarif_log(
        metric_rules(names),
        [_result(change, names.index(change.metric), matrix_file, line) for change in worse],
        automationDetails={"id": "compare/"},
        invocations=[{"executionSuccessful": True}],
        properties={"base": comparison.base, "head": comparison.head, "counts": comparison.counts},
    )
    return json.dumps(log, indent=1) + "\n"


def _result(change: Change, rule: int, matrix_file: str | None, line: int | None) -> dict[str, Any]:
    physical = {} if matrix_file is None else {"physicalLocation": line_location(matrix_file, line or 1)}
    logical = [{"fullyQualifiedName": escape_unprintable(change.cell)}]
    return {
        "ruleId": change.metric,
        "ruleIndex": rule,
        "level": _LEVELS[change.verdict],
        "message": {"text": escape_unprintable(sentence(change))},
        "locations": [{**physical, "logicalLocations": logical}],
        "partialFingerprints": {"figure/v1": fingerprint(change.metric, change.cell_id)},
    }
