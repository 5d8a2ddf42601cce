"""An audit as SARIF 2.1.0 (OASIS standard, errata 01), which editors and code scanning read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from benchbox import __version__
from benchbox.audit.rules import rules
from benchbox.report.audit.view import (
    group_by_reason,
    message,
    names,
    escape_unprintable,
    format_suppression,
    to_json,
    sort_by_severity,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.audit.findings import Finding
    from benchbox.audit.judge import AppliedSuppression
    from benchbox.audit.rules.base import Rule
    from benchbox.report.audit.view import Audit

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
# What is unknown fails an audit: as a note or a "review" it would pass.
_LEVELS: Mapping[str, str] = {"error": "error", "unknown": "error", "warning": "warning", "info": "note"}


def sarif_report(audit: Audit) -> str:
    """One log with one run. Parameters are logical locations, in the script of a command or in a checkpoint; a session has no
    such file, and GitHub's code scanning takes only results that have one. Rules that could not be judged are notifications of
    the tool, what was suppressed are suppressed results.
    """
    judgement = audit.judgement
    state = "new" if judgement.known else None
    file = _file(audit.told)
    results = [_result(finding, file, state) for finding in sort_by_severity(judgement.findings)]
    results += [_result(finding, file, "unchanged") for finding in sort_by_severity(judgement.known)]
    results += [_suppressed(each, file, state) for each in judgement.suppressed if each.matched]
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
        "fullDescription": {"text": rule.rationale},
        "help": {"text": f"Measured: {rule.measurement}. Repair: {rule.repair}."},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"references": list(rule.references)},
    }


def _file(told: Mapping[str, Any]) -> str | None:
    """The script that a command runs, or the checkpoint: a URI, relative below the working directory."""
    words = [told["path"]] if "path" in told else [word for word in told.get("command", ()) if word.endswith(".py")]
    if not words:
        return None
    path = Path(words[0])
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))


def _result(finding: Finding, file: str | None, state: str | None) -> dict[str, Any]:
    """`state` says how it stands to a baseline: once one result says so, all do."""
    held = finding.to_dict()
    return {
        "ruleId": finding.code,
        "ruleIndex": list(rules()).index(finding.code),
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{message(finding)}. Repair: {finding.repair}."},
        "locations": _locations(names(finding), escape_unprintable(finding.where), file),
        "partialFingerprints": {"finding/v1": _fingerprint(finding)},
        "properties": {part: held[part] for part in ("severity", "where", "rank", "evidence")},
    } | _standing(state)


def _standing(state: str | None) -> dict[str, str]:
    return {} if state is None else {"baselineState": state}


def _locations(names: list[str], where: str, file: str | None) -> list[dict[str, Any]]:
    """The parameters that are named, each of which has to change; the optimizer or whatever else it is where none is."""
    places = [{"fullyQualifiedName": name, "kind": "member"} for name in names] or [{"fullyQualifiedName": where}]
    in_file = {} if file is None else {"physicalLocation": {"artifactLocation": {"uri": file}}}
    return [{**in_file, "logicalLocations": [place]} for place in places]


def _fingerprint(finding: Finding) -> str:
    """The same for a finding that is there again, whatever was measured this time."""
    told = "\0".join((finding.code, finding.title, escape_unprintable(finding.where), *names(finding)))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _suppressed(suppressed: AppliedSuppression, file: str | None, state: str | None) -> dict[str, Any]:
    rule = rules()[suppressed.code]
    return {
        "ruleId": rule.code,
        "ruleIndex": list(rules()).index(rule.code),
        "level": _LEVELS[rule.severity],
        "message": {"text": f"{rule.title}. Suppressed for {escape_unprintable(suppressed.parameters)}"},
        "locations": _locations(
            [escape_unprintable(name) for name in suppressed.names], escape_unprintable(suppressed.parameters), file
        ),
        "suppressions": [{"kind": "external", "status": "accepted", "justification": escape_unprintable(suppressed.reason)}],
    } | _standing(state)


def _notifications(audit: Audit) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "level": "note",
            "message": {"text": f"{code} could not be judged: {escape_unprintable(reason)}"},
            "associatedRule": {"id": code, "index": list(rules()).index(code)},
        }
        for reason, codes in group_by_reason(audit.judgement.not_judged).items()
        for code in codes
    ]
    found += [
        {"level": "warning", "message": {"text": f"suppressed: {format_suppression(each)}"}}
        for each in audit.judgement.suppressed
        if not each.matched
    ]
    found += [
        {"level": "warning", "message": {"text": f"the witness failed on rank {rank}: {escape_unprintable(problem)}"}}
        for rank, problem in audit.problems
    ]
    return found
