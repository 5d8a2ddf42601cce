"""An audit as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from benchbox.audit.record import summarize_numbers
from benchbox.report.audit.view import sort_by_severity, to_json

if TYPE_CHECKING:
    from benchbox.report.audit.view import Audit

# A public surface: fields are added, never renamed.
SCHEMA_VERSION = 1


def json_report(audit: Audit) -> str:
    """Return the audit as JSON.

    Beside `subject`, `findings` and `census` it has the rules that were `clean`, those `not_judged` with their reasons,
    suppressions and their effect (`suppressed`), findings of the baseline (`known`), the effect of the steps on the weights
    (`numbers`), how the subject itself failed (`failure`), and failures of the observer (`problems`).
    """
    judgement = audit.judgement
    return to_json(
        {
            "schema_version": SCHEMA_VERSION,
            "subject": {**audit.subject, "title": audit.title, "optimizer_chain": audit.chain or None},
            "findings": [finding.to_dict() for finding in sort_by_severity(judgement.findings)],
            "census": [entry.to_dict() for facts in audit.facts for entry in facts.entries],
            "clean": list(judgement.clean),
            "not_judged": dict(judgement.not_judged),
            "suppressed": [asdict(suppressed) for suppressed in judgement.suppressed],
            "known": [finding.to_dict() for finding in sort_by_severity(judgement.baseline_findings)],
            "numbers": summarize_numbers(audit.facts),
            "failure": audit.failure,
            "problems": [{"rank": rank, "problem": problem} for rank, problem in audit.problems],
        }
    )
