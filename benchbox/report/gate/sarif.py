"""A gate as SARIF 2.1.0: a rule for each metric, and a result at the line of each threshold that did not simply pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.report.gate.view import row_sentence
from benchbox.report.sarif import file_location, file_uri, fingerprint, line_location, metric_rules, sarif_log
from benchbox.report.unprintable import escape_unprintable

if TYPE_CHECKING:
    from benchbox.analysis.gate import GateRow
    from benchbox.report.gate.view import GateView

# A missing value fails the check: as a note it would pass.
_LEVELS = {"breach": "error", "missing": "error", "warning": "warning", "inconclusive": "note", "accepted": "note"}


def render_gate_sarif(view: GateView) -> str:
    """Render a gate as a SARIF log with one run. An accepted breach is a suppressed result."""
    names = list(dict.fromkeys(row.metric for row in view.rows))
    results = [_result(row, names.index(row.metric), view) for row in view.noted]
    log = sarif_log(
        metric_rules(names),
        results,
        automationDetails={"id": "check/"},
        invocations=[{"executionSuccessful": True}],
        properties={"run": escape_unprintable(view.path), "verdict": view.verdict, "demands": len(view.rows)},
    )
    return json.dumps(log, indent=1) + "\n"


def _result(row: GateRow, rule: int, view: GateView) -> dict[str, Any]:
    file, line = view.position(row)
    cell = escape_unprintable(row.cell)
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": cell}]}
    if file is not None:
        physical = file_location(file_uri(Path(file))) if line is None else line_location(file, line)
        location = {"physicalLocation": physical, **location}
    result = {
        "ruleId": row.metric,
        "ruleIndex": rule,
        "level": _LEVELS[row.verdict],
        "message": {"text": escape_unprintable(row_sentence(row))},
        "locations": [location],
        "partialFingerprints": {"demand/v1": fingerprint(row.metric, row.cell_id or row.cell, row.verdict)},
        "properties": row.to_dict(),
    }
    if row.verdict == "accepted":
        result["suppressions"] = [
            {"kind": "external", "status": "accepted", "justification": escape_unprintable(row.note or "")}
        ]
    return result
