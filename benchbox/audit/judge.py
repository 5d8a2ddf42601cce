"""From facts to findings: every selected rule over the facts of all ranks, less what is suppressed or known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from benchbox.audit.findings import FAILING
from benchbox.audit.rules import rules
from benchbox.audit.rules.base import MAX_NAMES
from benchbox.audit.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from benchbox.audit.findings import Finding
    from benchbox.audit.rules.base import Rule
    from benchbox.audit.selection import Suppression
    from benchbox.observer.facts import RankFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedSuppression:
    """What a rule was told not to speak of, and why. `names` are the tensors it would have named, up to ten of them."""

    code: str
    parameters: str
    reason: str
    names: tuple[str, ...]
    matched: int  # how many there are; 0: nothing changes without this suppression, and it is out of date


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What an audit found. `known` are findings that were there in the baseline: they no longer fail the audit."""

    findings: tuple[Finding, ...]
    known: tuple[Finding, ...] = ()
    clean: tuple[str, ...] = ()
    not_judged: Mapping[str, str] = field(default_factory=dict)  # code: reason
    suppressed: tuple[AppliedSuppression, ...] = ()

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
    suppressed: list[AppliedSuppression] = []
    for code, rule in rules().items():
        if not selection.selects(code):
            continue
        suppressions = [each for each in selection.suppressions if each.rule == code]
        found = list(rule.findings(_without(facts, suppressions)))
        suppressed += [_suppressed(rule, facts, each, suppressions) for each in suppressions]
        for finding in found:
            (known if selection.knows(finding) else findings).append(finding)
        if not found and (reason := rule.not_judged_reason(facts)) is not None:
            not_judged[code] = reason
        elif not found:
            clean.append(code)
    return Judgement(
        findings=tuple(findings),
        known=tuple(known),
        clean=tuple(clean),
        not_judged=not_judged,
        suppressed=tuple(suppressed),
    )


def _narrowed(facts: Sequence[RankFacts], keep: Callable[[Any], bool]) -> list[RankFacts]:
    """The facts with some of their tensors, parameters and buffers only."""
    return [
        replace(
            each,
            stepped=tuple(filter(keep, each.stepped)),
            parameters=tuple(filter(keep, each.parameters)),
            buffers=tuple(filter(keep, each.buffers)),
        )
        for each in facts
    ]


def _without(facts: Sequence[RankFacts], suppressions: Iterable[Suppression]) -> list[RankFacts]:
    """The facts as a rule sees them that must not speak of certain tensors."""
    patterns = [each.parameters for each in suppressions]
    return _narrowed(facts, lambda tensor: not any(_matches(tensor, pattern) for pattern in patterns))


def _matches(tensor: Any, pattern: str) -> bool:
    """By its name; a partition only if all parameters it covers match."""
    covers = getattr(tensor, "covers", ()) or (tensor.name,)
    return fnmatchcase(tensor.name, pattern) or all(fnmatchcase(name, pattern) for name in covers)


def _suppressed(
    rule: Rule, facts: Sequence[RankFacts], suppression: Suppression, together: Sequence[Suppression]
) -> AppliedSuppression:
    """A suppression is needed where the rule, with all others in force, says something else without it. What it keeps from the
    rule is what the rule names when it sees nothing else.
    """
    others = _without(facts, [each for each in together if each is not suppression])
    needed = list(rule.findings(others)) != list(rule.findings(_without(facts, together)))
    alone = _narrowed(others, lambda tensor: _matches(tensor, suppression.parameters))
    evidence = [finding.evidence for finding in rule.findings(alone)] if needed else []
    names = dict.fromkeys(name for each in evidence for name in each.get("names", ()))
    return AppliedSuppression(
        code=rule.code,
        parameters=suppression.parameters,
        reason=suppression.reason,
        names=tuple(names)[:MAX_NAMES],
        matched=max(len(names) + sum(each.get("more", 0) for each in evidence), int(needed)),
    )
