"""Audits to print: two ranks that train in pure bfloat16, and facts that are hard to print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.audit.judge import judge
from benchbox.audit.selection import BaselineFinding, Selection, Suppression
from benchbox.observer.facts import OpaqueOptimizer, SourceLocation
from benchbox.report.audit.view import Audit
from tests.support.facts import HALF_MOMENTS, NORM, half, ranks, ranks_stepping, tensor

if TYPE_CHECKING:
    from benchbox.observer.facts import RankFacts

SUBJECT = {"kind": "command", "command": ["torchrun", "--nproc_per_node", "2", "train.py", "--lr", "1e-3"]}
# Ends a terminal's line, an XML document, a markup and a string.
HOSTILE = "\x1b[31m[red]\n\x00</testcase>\"'&\u202e\udcff"


def audit(facts: list[RankFacts], selection: Selection | None = None, **subject: Any) -> Audit:
    """Return the audit of these facts, as the verb builds it."""
    return Audit(title="train.py: 6 steps seen", subject=subject or SUBJECT, facts=facts, judgement=judge(facts, selection))


def pure(**changes: Any) -> list[RankFacts]:
    """Return two ranks that step bfloat16 weights with bfloat16 moments: BXP101, BXP106 and BXP201 fire, and nothing else."""
    return ranks_stepping(half(state=HALF_MOMENTS), half(NORM, state=HALF_MOMENTS), **changes)


def unreadable() -> list[RankFacts]:
    """Return two ranks with an optimizer that cannot be read."""
    return ranks(opaque=(OpaqueOptimizer(optimizer="Mystery", reason="its step is compiled"),))


def suppressing(rule: str, parameters: str) -> Selection:
    return Selection(suppressions=(Suppression(rule=rule, parameters=parameters, reason="known since May"),))


def with_baseline(facts: list[RankFacts], code: str) -> Selection:
    """Return a selection with a baseline of the findings of one rule."""
    findings = [finding for finding in judge(facts).findings if finding.code == code]
    return Selection(baseline=frozenset(BaselineFinding.from_dict(finding.to_dict()) for finding in findings))


def hostile() -> list[RankFacts]:
    """Return two ranks whose names, optimizer, reasons and problems contain characters that every format must escape."""
    return pure(
        stepped=(half(HOSTILE, optimizer=HOSTILE, state=HALF_MOMENTS), tensor()),
        optimizer_chain=(HOSTILE,),
        missing={"loads": HOSTILE},
        locations=(
            SourceLocation(
                kind="cast", name=HOSTILE, file=HOSTILE, line=1, function=HOSTILE, stack=(f"{HOSTILE}:1 in {HOSTILE}",)
            ),
        ),
        problems=(HOSTILE,),
    )
