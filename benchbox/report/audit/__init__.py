"""Reports of an audit, for people and for programs: one module for each format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.report.audit.view import Audit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.audit.judge import Judgement
    from benchbox.observer.facts import RankFacts


def write_audit(
    output_format: str,
    title: str,
    subject: Mapping[str, Any],
    facts: Sequence[RankFacts],
    judgement: Judgement,
    *,
    warnings: bool = False,
    failure: str | None = None,
) -> None:
    """Print an audit on stdout.

    Args:
        output_format: `text`, `json`, `sarif` or `junit`.
        title: the subject in one line, for people.
        subject: the subject for programs, plain JSON values with its `kind` among them.
        facts: of every rank.
        judgement: of these facts.
        warnings: whether warnings fail the audit, as test cases of `junit`.
        failure: how the subject itself failed, if it did.
    """
    audit = Audit(title=title, subject=subject, facts=facts, judgement=judgement, failure=failure)
    if output_format == "text":
        from rich.console import Console

        from benchbox.report.audit.text import print_audit

        print_audit(Console(highlight=False), audit)
    elif output_format == "json":
        from benchbox.report.audit.as_json import json_report

        print(json_report(audit))
    elif output_format == "sarif":
        from benchbox.report.audit.sarif import sarif_report

        print(sarif_report(audit))
    elif output_format == "junit":
        from benchbox.report.audit.junit import junit_report

        print(junit_report(audit, warnings=warnings))
    else:
        raise AssertionError(f"no format is called {output_format}")
