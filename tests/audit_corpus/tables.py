"""Tables of the corpus: Markdown for people, JSON for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.audit_corpus.verdicts import Verdict

_EQUALITY = {True: "equal", False: "DIFFERENT", None: "not comparable"}


def write_tables(verdicts: Sequence[Verdict], folder: Path) -> str:
    """Write `corpus.json` and `corpus.md`, and return the table of the latter."""
    (folder / "corpus.json").write_text(json.dumps([verdict.to_dict() for verdict in verdicts], indent=1) + "\n")
    table = _table(verdicts)
    wrong = "\n\n".join(_details(verdict) for verdict in verdicts if not verdict.right)
    (folder / "corpus.md").write_text(f"{describe_totals(verdicts)}\n\n{table}\n\n{wrong}\n")
    return table


def describe_totals(verdicts: Sequence[Verdict]) -> str:
    """Return the counts of a table in one line."""
    mistaken = [verdict for verdict in verdicts if verdict.mistake]
    clean = [verdict for verdict in verdicts if not verdict.mistake]
    found = sum(verdict.verdict == "found" for verdict in mistaken)
    silent = sum(verdict.verdict == "silent" for verdict in clean)
    equal = sum(verdict.checksums_equal is True for verdict in verdicts)
    return (
        f"{found} of {len(mistaken)} mistakes found, {silent} of {len(clean)} clean scripts silent, "
        f"checksums equal in {equal} of {len(verdicts)}"
    )


def _table(verdicts: Sequence[Verdict]) -> str:
    rows = ["| script | expected | verdict | reported | CPU alone | CPU audited | ratio | checksums |", "|---" * 8 + "|"]
    for verdict in verdicts:
        reported = sorted({line.partition(":")[0] for line in verdict.findings})
        mark = "" if verdict.right else " **wrong**"
        ratio = "" if verdict.cpu_ratio is None else f"{verdict.cpu_ratio:.2f}"
        rows.append(
            f"| {verdict.name} | {' or '.join(verdict.expected) or 'clean'} | {verdict.verdict}{mark} | {', '.join(reported)} "
            f"| {verdict.cpu_alone_s:.1f} s | {verdict.cpu_audited_s:.1f} s | {ratio} | {_EQUALITY[verdict.checksums_equal]} |"
        )
    return "\n".join(rows)


def _details(verdict: Verdict) -> str:
    expected = f"{verdict.mistake} ({' or '.join(verdict.expected)})" if verdict.mistake else "clean"
    lines = [f"### {verdict.name}: {verdict.verdict}", "", f"expected: {expected}", *verdict.findings, *verdict.remarks]
    return "\n".join(lines)
