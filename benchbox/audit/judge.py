"""From facts to findings: every selected rule over the facts of all ranks, less what is suppressed or known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from benchbox.audit.findings import FAILING
from benchbox.audit.rules import rules
from benchbox.audit.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.audit.findings import Finding
    from benchbox.audit.rules.rule import Rule
    from benchbox.audit.selection import Suppression
    from benchbox.measure.witness.facts import RankFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppressed:
    """Parameters that a rule would have fired on, and why it was told not to."""

    code: str
    parameters: str
    reason: str
    matched: int  # parameters of this name that the facts hold; 0: the suppression is out of date


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What an audit found. `known` are findings that were there in the baseline: they no longer fail the audit."""

    findings: tuple[Finding, ...]
    known: tuple[Finding, ...] = ()
    clean: tuple[str, ...] = ()
    not_judged: Mapping[str, str] = field(default_factory=dict)  # code: reason
    suppressed: tuple[Suppressed, ...] = ()

    @property
    def failing(self) -> tuple[str, ...]:
        """Codes that keep the audit from passing."""
        return tuple(dict.fromkeys(finding.code for finding in self.findings if finding.severity in FAILING))


def judge(facts: Sequence[RankFacts], selection: Selection | None = None) -> Judgement:
    """Run the rules over the facts of all ranks of one subject."""
    selection = selection or Selection()
    findings: list[Finding] = []
    known: list[Finding] = []
    clean: list[str] = []
    not_judged: dict[str, str] = {}
    for code, rule in rules().items():
        if not selection.takes(code):
            continue
        seen = _without(facts, [each for each in selection.suppressions if each.rule == code])
        found = list(rule.findings(seen))
        for finding in found:
            (known if selection.knows(finding) else findings).append(finding)
        if not found and (reason := rule.unseen(facts)) is not None:
            not_judged[code] = reason
        elif not found:
            clean.append(code)
    return Judgement(
        findings=tuple(findings),
        known=tuple(known),
        clean=tuple(clean),
        not_judged=not_judged,
        suppressed=tuple(_suppressed(rules()[each.rule], facts, each) for each in selection.suppressions),
    )


def _without(facts: Sequence[RankFacts], suppressions: Sequence[Suppression]) -> list[RankFacts]:
    """The facts as a rule sees them that must not speak of certain parameters and buffers."""
    if not suppressions:
        return list(facts)
    patterns = [each.parameters for each in suppressions]

    def kept(tensors: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(tensor for tensor in tensors if not any(_matches(tensor, pattern) for pattern in patterns))

    return [
        replace(each, stepped=kept(each.stepped), parameters=kept(each.parameters), buffers=kept(each.buffers))
        for each in facts
    ]


def _matches(tensor: Any, pattern: str) -> bool:
    """By its name; a partition only if all parameters it covers match."""
    covers = getattr(tensor, "covers", ()) or (tensor.name,)
    return fnmatchcase(tensor.name, pattern) or all(fnmatchcase(name, pattern) for name in covers)


def _suppressed(rule: Rule, facts: Sequence[RankFacts], suppression: Suppression) -> Suppressed:
    tensors: list[Any] = [tensor for each in facts for held in (each.stepped, each.parameters, each.buffers) for tensor in held]
    names = {tensor.name for tensor in tensors if _matches(tensor, suppression.parameters)}
    return Suppressed(code=rule.code, parameters=suppression.parameters, reason=suppression.reason, matched=len(names))
