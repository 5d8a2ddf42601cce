"""An audit as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from benchbox.audit.record import summarize_numbers
from benchbox.report.audit.view import to_json, sort_by_severity

if TYPE_CHECKING:
    from benchbox.report.audit.view import Audit

# A public surface: fields are added, never renamed.
SCHEMA_VERSION = 1


def json_report(audit: Audit) -> str:
    """`subject`, `findings` and `census`; then the rules that were clean and those that could not be judged, with the reason;
    what was suppressed, and what a baseline had already; what the steps did to the weights; where the witness itself failed.
    """
    judgement = audit.judgement
    return to_json(
        {
            "schema_version": SCHEMA_VERSION,
            "subject": {**audit.told, "title": audit.title, "optimizer_chain": audit.chain or None},
            "findings": [finding.to_dict() for finding in sort_by_severity(judgement.findings)],
            "census": [entry.to_dict() for each in audit.facts for entry in each.entries],
            "clean": list(judgement.clean),
            "not_judged": dict(judgement.not_judged),
            "suppressed": [asdict(each) for each in judgement.suppressed],
            "known": [finding.to_dict() for finding in sort_by_severity(judgement.known)],
            "numbers": summarize_numbers(audit.facts),
            "problems": [{"rank": rank, "problem": problem} for rank, problem in audit.problems],
        }
    )
