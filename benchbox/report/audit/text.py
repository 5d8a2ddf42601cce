"""An audit for people: on a terminal wrapped to its width, anywhere else in unwrapped lines."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import counted, quantity
from benchbox.audit.record import summarize_numbers
from benchbox.report.audit.view import (
    evidence_rows,
    format_ranks,
    format_suppression,
    group_by_reason,
    location_rows,
    sort_by_severity,
)
from benchbox.report.rows import print_rows, say
from benchbox.report.unprintable import escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from benchbox.audit.findings import Finding
    from benchbox.report.audit.view import Audit

_STYLES: Mapping[str, str] = {"error": "bold red", "unknown": "bold magenta", "warning": "bold yellow", "info": "bold cyan"}
_SHARED_EVIDENCE = frozenset({"ranks", "dtypes", "tensors", "elements", "names", "edq of these", "lr", "state"})
_MIN_WIDTH = 40  # columns: on fewer, wrapping leaves one word on a line


def print_audit(console: Console, audit: Audit) -> None:
    """Print the subject, the census, the findings, and the rules that were clean or not judged."""
    judgement = audit.judgement
    _print_paragraph(console, escape_unprintable(audit.title), style="bold")
    stepped_by = f", stepped by {escape_unprintable(audit.chain)}" if audit.chain else ""
    _print_paragraph(console, counted(len(audit.facts), "rank") + stepped_by)
    if any(facts.entries for facts in audit.facts):
        say(console)
        _print_census(console, audit)
    if summary := _summarize_updates(audit):
        say(console)
        _print_paragraph(console, summary, hanging=2)
    codes_by_repair: dict[str, str] = {}
    findings = sort_by_severity(judgement.findings)
    for finding in findings:
        if finding.cause is not None:
            continue
        say(console)
        repair = f"as for {codes_by_repair[finding.repair]}" if finding.repair in codes_by_repair else finding.repair
        codes_by_repair.setdefault(finding.repair, finding.code)
        consequences = [f for f in findings if (f.cause, f.where) == (finding.code, finding.where)]
        _print_finding(console, finding, consequences, repair)
    say(console)
    for line in _conclusion_lines(audit):
        _print_paragraph(console, line, hanging=2)


def _print_census(console: Console, audit: Audit) -> None:
    """Print one row for each kind, dtype and device; ranks with equal rows share one."""
    ranks_by_row: dict[tuple[Any, ...], list[int]] = {}
    for facts in audit.facts:
        for entry in facts.entries:
            key = (entry.kind, entry.dtype, entry.device, entry.tensors, entry.elements, entry.bytes)
            ranks_by_row.setdefault(key, []).append(entry.rank)
    rows = [
        (
            format_ranks(ranks),
            *map(escape_unprintable, (kind, dtype, device)),
            str(tensors),
            f"{elements:,}",
            quantity(size, "bytes"),
        )
        for (kind, dtype, device, tensors, elements, size), ranks in ranks_by_row.items()
    ]
    headers = ("ranks", "kind", "dtype", "device", "tensors", "elements", "bytes")
    print_rows(console, headers, rows, right=("tensors", "elements", "bytes"))


def _summarize_updates(audit: Audit) -> str:
    """Return the effect of the observed steps over all tensors and ranks in one line; "" if none was measured."""
    numbers = summarize_numbers(audit.facts)
    edq, lost, stalled = numbers["edq"], numbers["updates_lost"], numbers["second_moment_stalled"]
    parts = []
    if edq is not None:
        parts += [f"edq {edq:.4f} (1 when every update arrives)", f"{quantity(lost, 'fraction')} of updates lost"]
    if stalled is not None:
        parts.append(f"{quantity(stalled, 'fraction')} of the 16-bit second moments cannot decay")
    return f"over all tensors: {', '.join(parts)}" if parts else ""


def _print_finding(console: Console, finding: Finding, consequences: Sequence[Finding], repair: str) -> None:
    heading = f"{finding.code} {finding.severity}: {escape_unprintable(finding.title)}"
    _print_paragraph(console, heading, style=_STYLES[finding.severity])
    rows = [
        ("where", escape_unprintable(finding.where)),
        *evidence_rows(finding),
        *location_rows(finding),
        *(("consequence", _format_consequence(consequence)) for consequence in consequences),
        ("repair", repair),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        style = "green" if name == "repair" else ""
        _print_paragraph(console, f"  {name:<{width}}  {text}", hanging=width + 4, style=style)


def _format_consequence(finding: Finding) -> str:
    """Format a finding as one line, without what it shares with its cause."""
    evidence = "; ".join(f"{key}: {text}" for key, text in evidence_rows(finding) if key not in _SHARED_EVIDENCE)
    return f"{finding.code} {finding.severity}: {escape_unprintable(finding.title)}" + (f" ({evidence})" if evidence else "")


def _conclusion_lines(audit: Audit) -> Iterator[str]:
    judgement = audit.judgement
    counts = Counter(finding.severity for finding in sort_by_severity(judgement.findings))
    # "2 unknown" and "2 info", but "2 errors".
    summary = ", ".join(
        counted(count, severity, None if severity in ("error", "warning") else severity) for severity, count in counts.items()
    )
    yield f"found: {summary or 'nothing'}"
    if judgement.clean:
        yield f"clean: {', '.join(judgement.clean)}"
    for reason, codes in group_by_reason(judgement.not_judged).items():
        yield f"not judged: {', '.join(codes)}: {escape_unprintable(reason)}"
    for suppressed in judgement.suppressed:
        yield f"suppressed: {format_suppression(suppressed)}"
    for finding in sort_by_severity(judgement.baseline_findings):
        where, title = escape_unprintable(finding.where), escape_unprintable(finding.title)
        yield f"known: {finding.code} {finding.severity} in {where}: {title}"
    for rank, problem in audit.problems:
        yield f"the observer failed on rank {rank}: {escape_unprintable(problem)}"


def _print_paragraph(console: Console, text: str, *, hanging: int = 0, style: str = "") -> None:
    if not console.is_terminal or console.width < _MIN_WIDTH:
        say(console, text, style)
        return
    indent = " " * min(hanging, console.width // 2)
    for line in textwrap.wrap(text, console.width, subsequent_indent=indent, break_on_hyphens=False):
        say(console, line, style)
