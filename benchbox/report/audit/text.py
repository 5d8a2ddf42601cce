"""An audit for people: on a terminal wrapped to its width, anywhere else in whole lines."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import quantity
from benchbox.audit.record import summarize_numbers
from benchbox.report.audit.view import (
    group_by_reason,
    evidence_rows,
    escape_unprintable,
    format_ranks,
    format_suppression,
    sort_by_severity,
)
from benchbox.report.rows import print_rows, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console

    from benchbox.audit.findings import Finding
    from benchbox.report.audit.view import Audit

_STYLES: Mapping[str, str] = {"error": "bold red", "unknown": "bold magenta", "warning": "bold yellow", "info": "bold cyan"}
_NARROWEST = 40  # columns: on less, wrapping makes a ladder of words


def print_audit(console: Console, audit: Audit) -> None:
    """Print the subject, what was counted, what was found, and what was not."""
    judgement = audit.judgement
    ranks = len(audit.facts)
    _paragraph(console, escape_unprintable(audit.title), style="bold")
    stepped_by = f", stepped by {escape_unprintable(audit.chain)}" if audit.chain else ""
    _paragraph(console, ("1 rank" if ranks == 1 else f"{ranks} ranks") + stepped_by)
    if any(each.entries for each in audit.facts):
        say(console)
        _print_census(console, audit)
    if told := _what_arrived(audit):
        say(console)
        _paragraph(console, told, hanging=2)
    repairs: dict[str, str] = {}
    for finding in sort_by_severity(judgement.findings):
        say(console)
        first = repairs.setdefault(finding.repair, finding.code)
        _print_finding(console, finding, finding.repair if first == finding.code else f"as for {first}")
    say(console)
    for line in _verdict(audit):
        _paragraph(console, line, hanging=2)


def _print_census(console: Console, audit: Audit) -> None:
    """One row a kind, dtype and device; ranks that hold the same share one."""
    ranks: dict[tuple[Any, ...], list[int]] = {}
    for each in audit.facts:
        for entry in each.entries:
            key = (entry.kind, entry.dtype, entry.device, entry.tensors, entry.elements, entry.bytes)
            ranks.setdefault(key, []).append(entry.rank)
    rows = [
        (
            format_ranks(held),
            escape_unprintable(kind),
            escape_unprintable(dtype),
            escape_unprintable(device),
            str(tensors),
            f"{elements:,}",
            quantity(size, "bytes"),
        )
        for (kind, dtype, device, tensors, elements, size), held in ranks.items()
    ]
    headers = ("ranks", "kind", "dtype", "device", "tensors", "elements", "bytes")
    print_rows(console, headers, rows, right=("tensors", "elements", "bytes"))


def _what_arrived(audit: Audit) -> str:
    """What the steps that were looked at did, over all tensors and ranks; nothing where none was."""
    numbers = summarize_numbers(audit.facts)
    edq, lost, stalled = numbers["edq"], numbers["updates_lost"], numbers["second_moment_stalled"]
    parts = []
    if edq is not None:
        parts += [f"edq {edq:.4f} (1 when every update arrives)", f"{quantity(lost, 'fraction')} of updates lost"]
    if stalled is not None:
        parts.append(f"{quantity(stalled, 'fraction')} of the 16-bit second moments cannot decay")
    return f"over all tensors: {', '.join(parts)}" if parts else ""


def _print_finding(console: Console, finding: Finding, repair: str) -> None:
    _paragraph(
        console, f"{finding.code} {finding.severity}: {escape_unprintable(finding.title)}", style=_STYLES[finding.severity]
    )
    rows = [("where", escape_unprintable(finding.where)), *evidence_rows(finding), ("repair", repair)]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        _paragraph(console, f"  {name:<{width}}  {text}", hanging=width + 4, style="green" if name == "repair" else "")


def _verdict(audit: Audit) -> Iterator[str]:
    judgement = audit.judgement
    counts = Counter(finding.severity for finding in sort_by_severity(judgement.findings))
    told = ", ".join(f"{count} {_plural(severity) if count > 1 else severity}" for severity, count in counts.items())
    yield f"found: {told}" if told else "found: nothing"
    if judgement.clean:
        yield f"clean: {', '.join(judgement.clean)}"
    for reason, codes in group_by_reason(judgement.not_judged).items():
        yield f"not judged: {', '.join(codes)}: {escape_unprintable(reason)}"
    for each in judgement.suppressed:
        yield f"suppressed: {format_suppression(each)}"
    for finding in sort_by_severity(judgement.known):
        yield f"known: {finding.code} {finding.severity} in {escape_unprintable(finding.where)}: {escape_unprintable(finding.title)}"
    for rank, problem in audit.problems:
        yield f"the witness failed on rank {rank}: {escape_unprintable(problem)}"


def _plural(severity: str) -> str:
    return f"{severity}s" if severity in {"error", "warning"} else severity


def _paragraph(console: Console, text: str, *, hanging: int = 0, style: str = "") -> None:
    if not console.is_terminal or console.width < _NARROWEST:
        say(console, text, style)
        return
    indent = " " * min(hanging, console.width // 2)
    for line in textwrap.wrap(text, console.width, subsequent_indent=indent, break_on_hyphens=False):
        say(console, line, style)
