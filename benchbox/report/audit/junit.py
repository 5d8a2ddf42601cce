"""An audit as JUnit XML, in the form that CI systems read: one test case for each rule."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from benchbox.audit.findings import FAILING
from benchbox.audit.rules import rules
from benchbox.report.audit.view import format_finding, format_suppression, sort_by_severity
from benchbox.report.junit import junit_document
from benchbox.report.unprintable import escape_unprintable

if TYPE_CHECKING:
    from benchbox.report.audit.view import Audit


def junit_report(audit: Audit, *, warnings: bool = False) -> str:
    """Return the audit as JUnit XML.

    A rule with an error or an unknown result is a failed test case, with `warnings` also one with a warning; one that could not
    be judged is a skipped test case. Notes, findings of the baseline and suppressions are the output of a case that passes.
    A subject that failed itself is one more test case, with an error.
    """
    judgement = audit.judgement
    findings = sort_by_severity(judgement.findings)
    with_findings = {finding.code for finding in (*findings, *judgement.baseline_findings)}
    selected = {*judgement.clean, *judgement.not_judged, *with_findings}
    suite = ET.Element("testsuite", name=f"benchbox audit-precision: {escape_unprintable(audit.title)}")
    failures = 0
    severities = FAILING | {"warning"} if warnings else FAILING
    for code, rule in rules().items():
        if code not in selected:
            continue
        case = ET.SubElement(suite, "testcase", classname="benchbox.audit", name=f"{code} {rule.title}", time="0")
        of_rule = [finding for finding in findings if finding.code == code]
        failed = [finding for finding in of_rule if finding.severity in severities]
        if failed:
            failures += 1
            lines = [line for finding in failed for line in (format_finding(finding), f"repair: {finding.repair}")]
            failure = ET.SubElement(case, "failure", type=failed[0].severity, message=escape_unprintable(failed[0].title))
            failure.text = "\n".join(lines)
        elif code in judgement.not_judged:
            ET.SubElement(case, "skipped", message=escape_unprintable(judgement.not_judged[code]))
        output = [f"{finding.severity}: {format_finding(finding)}" for finding in of_rule if finding not in failed]
        output += [f"known: {format_finding(finding)}" for finding in judgement.baseline_findings if finding.code == code]
        output += [
            f"suppressed: {format_suppression(suppressed)}" for suppressed in judgement.suppressed if suppressed.code == code
        ]
        if output:
            ET.SubElement(case, "system-out").text = "\n".join(output)
    if audit.failure is not None:
        case = ET.SubElement(suite, "testcase", classname="benchbox.audit", name="the subject ran", time="0")
        ET.SubElement(case, "error", type="failure", message=escape_unprintable(audit.failure))
    cases = len(suite)
    if audit.problems:
        lines = [f"the observer failed on rank {rank}: {escape_unprintable(problem)}" for rank, problem in audit.problems]
        ET.SubElement(suite, "system-err").text = "\n".join(lines)
    skipped = len(judgement.not_judged)
    return junit_document(
        suite, {"tests": cases, "failures": failures, "errors": int(audit.failure is not None), "skipped": skipped}
    )
