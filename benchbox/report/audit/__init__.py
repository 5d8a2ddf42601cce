"""What an audit found, for people and for programs. One file for each format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.report.audit.view import Audit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.audit.judge import Judgement
    from benchbox.observer.facts import RankFacts


def write_audit(form: str, title: str, told: Mapping[str, Any], facts: Sequence[RankFacts], judgement: Judgement) -> None:
    """Print an audit on stdout, in one of `text`, `json`, `sarif`, `junit`.

    Args:
        form: which of them.
        title: the subject in one line, for people.
        told: the subject for programs, plain JSON values with its `kind` among them.
        facts: of every rank.
        judgement: of these facts.
    """
    audit = Audit(title=title, told=told, facts=facts, judgement=judgement)
    if form == "text":
        from rich.console import Console

        from benchbox.report.audit.text import print_audit

        print_audit(Console(highlight=False), audit)
    elif form == "json":
        from benchbox.report.audit.as_json import json_report

        print(json_report(audit))
    elif form == "sarif":
        from benchbox.report.audit.sarif import sarif_report

        print(sarif_report(audit))
    elif form == "junit":
        from benchbox.report.audit.junit import junit_report

        print(junit_report(audit))
    else:
        raise AssertionError(f"no format is called {form}")
