"""An audit as JUnit XML, in the form that CI systems read: one test case a rule."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from benchbox.audit.findings import FAILING
from benchbox.audit.rules import rules
from benchbox.report.audit.view import message, escape_unprintable, format_suppression, sort_by_severity

if TYPE_CHECKING:
    from benchbox.report.audit.view import Audit


def junit_report(audit: Audit) -> str:
    """Rules with an error, or of which is unknown whether they hold, failed; those that could not be judged are skipped.
    Warnings, notes, what a baseline had already and what was suppressed are told in the output of a test case that passes.
    """
    judgement = audit.judgement
    found = sort_by_severity(judgement.findings)
    judged = {*judgement.clean, *judgement.not_judged, *(each.code for each in (*found, *judgement.known))}
    suite = ET.Element("testsuite", name=f"benchbox audit-precision: {escape_unprintable(audit.title)}")
    failures = 0
    for code, rule in rules().items():
        if code not in judged:
            continue
        case = ET.SubElement(suite, "testcase", classname="benchbox.audit", name=f"{code} {rule.title}", time="0")
        mine = [finding for finding in found if finding.code == code]
        failed = [finding for finding in mine if finding.severity in FAILING]
        if failed:
            failures += 1
            lines = [line for finding in failed for line in (message(finding), f"repair: {finding.repair}")]
            failure = ET.SubElement(case, "failure", type=failed[0].severity, message=escape_unprintable(failed[0].title))
            failure.text = "\n".join(lines)
        elif code in judgement.not_judged:
            ET.SubElement(case, "skipped", message=escape_unprintable(judgement.not_judged[code]))
        told = [f"{finding.severity}: {message(finding)}" for finding in mine if finding not in failed]
        told += [f"known: {message(finding)}" for finding in judgement.known if finding.code == code]
        told += [f"suppressed: {format_suppression(each)}" for each in judgement.suppressed if each.code == code]
        if told:
            ET.SubElement(case, "system-out").text = "\n".join(told)
    cases = len(suite)
    if audit.problems:
        failed_at = [f"the witness failed on rank {rank}: {escape_unprintable(problem)}" for rank, problem in audit.problems]
        ET.SubElement(suite, "system-err").text = "\n".join(failed_at)
    for name, count in (("tests", cases), ("failures", failures), ("errors", 0), ("skipped", len(judgement.not_judged))):
        suite.set(name, str(count))
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    document: bytes = ET.tostring(suites, encoding="us-ascii", xml_declaration=True)
    return document.decode("ascii")
