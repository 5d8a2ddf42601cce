"""An audit as SARIF 2.1.0 (OASIS standard, errata 01): what code scanning of GitHub, GitLab and editors reads."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from benchbox import __version__
from benchbox.audit.rules import rules
from benchbox.report.audit.view import by_reason, message, names, plain, to_json, worst_first

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.audit.findings import Finding
    from benchbox.audit.judge import Suppressed
    from benchbox.audit.rules.base import Rule
    from benchbox.report.audit.view import Audit

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
# What is unknown fails an audit: as a note or a "review" it would pass.
_LEVELS: Mapping[str, str] = {"error": "error", "unknown": "error", "warning": "warning", "info": "note"}


def sarif_report(audit: Audit) -> str:
    """One log with one run. Parameters are logical locations: what is wrong is in no file that can be pointed at. Rules that
    could not be judged are notifications of the tool, what was suppressed are suppressed results.
    """
    judgement = audit.judgement
    state = "new" if judgement.known else None
    results = [_result(finding, state) for finding in worst_first(judgement.findings)]
    results += [_result(finding, "unchanged") for finding in worst_first(judgement.known)]
    results += [_suppressed(each) for each in judgement.suppressed if each.matched]
    run = {
        "tool": {"driver": {"name": "benchbox", "version": __version__, "rules": [_rule(each) for each in rules().values()]}},
        "automationDetails": {"id": f"audit-precision/{audit.told.get('kind', 'subject')}/"},
        "invocations": [{"executionSuccessful": not audit.problems, "toolExecutionNotifications": _notifications(audit)}],
        "results": results,
        "properties": {"subject": {**audit.told, "title": audit.title}, "clean": list(judgement.clean)},
    }
    return to_json({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"Measured: {rule.measured}. Repair: {rule.repair}."},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"references": list(rule.references)},
    }


def _result(finding: Finding, state: str | None) -> dict[str, Any]:
    held = finding.to_dict()
    return {
        "ruleId": finding.code,
        "ruleIndex": list(rules()).index(finding.code),
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{message(finding)}. Repair: {finding.repair}."},
        "locations": _locations(names(finding) or [plain(finding.where)]),
        "partialFingerprints": {"finding/v1": _fingerprint(finding)},
        "properties": {part: held[part] for part in ("severity", "where", "rank", "evidence")},
    } | ({} if state is None else {"baselineState": state})


def _locations(names: list[str]) -> list[dict[str, Any]]:
    return [{"logicalLocations": [{"fullyQualifiedName": name, "kind": "member"}]} for name in names]


def _fingerprint(finding: Finding) -> str:
    """The same for a finding that is there again, whatever was measured this time."""
    told = "\0".join((finding.code, finding.title, finding.where, *names(finding)))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _suppressed(suppressed: Suppressed) -> dict[str, Any]:
    rule = rules()[suppressed.code]
    return {
        "ruleId": rule.code,
        "ruleIndex": list(rules()).index(rule.code),
        "level": _LEVELS[rule.severity],
        "message": {"text": f"{rule.title}. Suppressed for {plain(suppressed.parameters)}"},
        "locations": _locations([plain(name) for name in suppressed.names]),
        "suppressions": [{"kind": "external", "status": "accepted", "justification": plain(suppressed.reason)}],
    }


def _notifications(audit: Audit) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "level": "note",
            "message": {"text": f"{code} could not be judged: {plain(reason)}"},
            "associatedRule": {"id": code, "index": list(rules()).index(code)},
        }
        for reason, codes in by_reason(audit.judgement.not_judged).items()
        for code in codes
    ]
    found += [
        {"level": "warning", "message": {"text": f"the witness failed on rank {rank}: {plain(problem)}"}}
        for rank, problem in audit.problems
    ]
    return found
