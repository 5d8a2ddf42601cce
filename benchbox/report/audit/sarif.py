"""An audit as SARIF 2.1.0 (OASIS standard, errata 01), which editors and code scanning read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.audit.rules import rules
from benchbox.errors import EXIT_CELL_FAILED
from benchbox.report.audit.view import (
    format_finding,
    format_suppression,
    group_by_reason,
    location_rows,
    sort_by_severity,
    tensor_names,
    to_json,
)
from benchbox.report.sarif import file_location, file_uri, fingerprint, line_location, sarif_log
from benchbox.report.unprintable import escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.audit.findings import Finding
    from benchbox.audit.judge import AppliedSuppression
    from benchbox.audit.rules.base import Rule
    from benchbox.report.audit.view import Audit

# An unknown result fails an audit: as a note or a "review" it would pass.
_LEVELS: Mapping[str, str] = {"error": "error", "unknown": "error", "warning": "warning", "info": "note"}


def sarif_report(audit: Audit) -> str:
    """Return the audit as a SARIF log with one run.

    Parameters are logical locations, in the script of a command or in a checkpoint. A session has no such file; GitHub's code
    scanning accepts only results that have one. Rules that could not be judged are notifications of the tool, and suppressions
    are suppressed results.
    """
    judgement = audit.judgement
    state = "new" if judgement.baseline_findings else None
    file = _subject_file(audit.subject)
    results = [_result(finding, file, state) for finding in sort_by_severity(judgement.findings)]
    results += [_result(finding, file, "unchanged") for finding in sort_by_severity(judgement.baseline_findings)]
    results += [_suppressed_result(suppressed, file, state) for suppressed in judgement.suppressed if suppressed.matched]
    descriptors = [_rule_descriptor(rule) for rule in rules().values()]
    log = sarif_log(
        descriptors,
        results,
        automationDetails={"id": f"audit-precision/{audit.subject.get('kind', 'subject')}/"},
        invocations=[_invocation(audit)],
        properties={"subject": {**audit.subject, "title": audit.title}, "clean": list(judgement.clean)},
    )
    return to_json(log)


def _invocation(audit: Audit) -> dict[str, Any]:
    """Return how the audit ran: not successfully if its subject or an observer failed."""
    exit_code = {} if audit.failure is None else {"exitCode": EXIT_CELL_FAILED}
    return {
        "executionSuccessful": not audit.problems and audit.failure is None,
        "toolExecutionNotifications": _notifications(audit),
    } | exit_code


def _rule_descriptor(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.rationale},
        "help": {"text": f"Measured: {rule.measurement}. Repair: {rule.repair}."},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"references": list(rule.references)},
    }


def _subject_file(subject: Mapping[str, Any]) -> str | None:
    """Return the URI of the script that a command runs, or of the checkpoint; relative if it is below the working directory."""
    if "path" in subject:
        files = [subject["path"]]
    else:
        files = [argument for argument in subject.get("command", ()) if argument.endswith(".py")]
    if not files:
        return None
    return file_uri(Path(files[0]))


def _result(finding: Finding, file: str | None, state: str | None) -> dict[str, Any]:
    """Return a finding as a result. `state` compares it to the baseline: if one result has a state, all must."""
    values, names, where = finding.to_dict(), tensor_names(finding), escape_unprintable(finding.where)
    return (
        {
            "ruleId": finding.code,
            "ruleIndex": list(rules()).index(finding.code),
            "level": _LEVELS[finding.severity],
            "message": {"text": f"{format_finding(finding)}. Repair: {finding.repair}."},
            "locations": _locations(names, where, _physical_location(finding, file)),
            "partialFingerprints": {"finding/v1": fingerprint(finding.code, finding.title, where, *names)},
            "properties": {key: values[key] for key in ("severity", "where", "rank", "evidence")},
        }
        | _related_locations(finding)
        | _baseline_state(state)
    )


def _baseline_state(state: str | None) -> dict[str, str]:
    return {} if state is None else {"baselineState": state}


def _locations(names: list[str], where: str, physical: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return one location for each named parameter, all of which have to change; without names, one for `where`."""
    logical = [{"fullyQualifiedName": name, "kind": "member"} for name in names] or [{"fullyQualifiedName": where}]
    in_file = {} if physical is None else {"physicalLocation": physical}
    return [{**in_file, "logicalLocations": [location]} for location in logical]


def _physical_location(finding: Finding, file: str | None) -> dict[str, Any] | None:
    """Return the likeliest line, or the subject's file; None if neither is known."""
    if finding.locations:
        return line_location(finding.locations[0].file, finding.locations[0].line)
    return None if file is None else file_location(file)


def _related_locations(finding: Finding) -> dict[str, Any]:
    """Return all locations of a finding as related locations, and the calls that led to each as a stack."""
    if not finding.locations:
        return {}
    labels = [f"{label} {text}" for label, text in location_rows(finding)]
    related = [
        {"id": index, "physicalLocation": line_location(location.file, location.line), "message": {"text": label}}
        for index, (location, label) in enumerate(zip(finding.locations, labels, strict=True))
    ]
    stacks = [
        {"message": {"text": label}, "frames": [_frame(call) for call in location.stack]}
        for location, label in zip(finding.locations, labels, strict=True)
    ]
    return {"relatedLocations": related, "stacks": stacks}


def _frame(call: str) -> dict[str, Any]:
    """Return the stack frame of a call, `file:line in function`."""
    where, _, function = call.rpartition(" in ")
    file, _, line = where.rpartition(":")
    function = escape_unprintable(function)
    return {
        "location": {"physicalLocation": line_location(file, int(line)), "logicalLocations": [{"fullyQualifiedName": function}]}
    }


def _suppressed_result(suppressed: AppliedSuppression, file: str | None, state: str | None) -> dict[str, Any]:
    rule = rules()[suppressed.code]
    parameters, names = escape_unprintable(suppressed.parameters), [escape_unprintable(name) for name in suppressed.names]
    reason = escape_unprintable(suppressed.reason)
    return {
        "ruleId": rule.code,
        "ruleIndex": list(rules()).index(rule.code),
        "level": _LEVELS[rule.severity],
        "message": {"text": f"{rule.title}. Suppressed for {parameters}"},
        "locations": _locations(names, parameters, None if file is None else file_location(file)),
        "suppressions": [{"kind": "external", "status": "accepted", "justification": reason}],
    } | _baseline_state(state)


def _notifications(audit: Audit) -> list[dict[str, Any]]:
    notifications: list[dict[str, Any]] = [
        {
            "level": "note",
            "message": {"text": f"{code} could not be judged: {escape_unprintable(reason)}"},
            "associatedRule": {"id": code, "index": list(rules()).index(code)},
        }
        for reason, codes in group_by_reason(audit.judgement.not_judged).items()
        for code in codes
    ]
    warnings = [
        f"suppressed: {format_suppression(suppressed)}" for suppressed in audit.judgement.suppressed if not suppressed.matched
    ]
    warnings += [f"the observer failed on rank {rank}: {escape_unprintable(problem)}" for rank, problem in audit.problems]
    if audit.failure is not None:
        notifications.append({"level": "error", "message": {"text": escape_unprintable(audit.failure)}})
    return [*notifications, *({"level": "warning", "message": {"text": warning}} for warning in warnings)]
