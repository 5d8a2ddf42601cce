"""Judge the facts of all ranks by the selected rules, and set aside suppressed findings and those of a baseline."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from benchbox.audit.findings import FAILING
from benchbox.audit.rules import rules
from benchbox.audit.rules.base import MAX_NAMES
from benchbox.audit.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from benchbox.audit.findings import Finding
    from benchbox.audit.rules.base import Rule
    from benchbox.audit.selection import Suppression
    from benchbox.observer.facts import RankFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedSuppression:
    """A suppression and its effect. `names` are the tensors that the rule would have named, up to ten of them."""

    code: str
    parameters: str
    reason: str
    names: tuple[str, ...]
    matched: int  # number of suppressed tensors; 0: the suppression has no effect and is out of date


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Result of an audit. `baseline_findings` were already in the baseline: they do not fail the audit."""

    findings: tuple[Finding, ...]
    baseline_findings: tuple[Finding, ...] = ()
    clean: tuple[str, ...] = ()
    not_judged: Mapping[str, str] = field(default_factory=dict)  # code: reason
    suppressed: tuple[AppliedSuppression, ...] = ()

    def failing(self, *, warnings: bool = False) -> tuple[str, ...]:
        """Return the codes that keep the audit from passing, with `warnings` also those of warnings."""
        severities = FAILING | {"warning"} if warnings else FAILING
        return tuple(dict.fromkeys(finding.code for finding in self.findings if finding.severity in severities))


def judge(facts: Sequence[RankFacts], selection: Selection | None = None) -> Judgement:
    """Run the rules over the facts of all ranks of one subject."""
    selection = selection or Selection()
    new_findings: list[Finding] = []
    baseline_findings: list[Finding] = []
    clean: list[str] = []
    not_judged: dict[str, str] = {}
    suppressed: list[AppliedSuppression] = []
    for code, rule in rules().items():
        if not selection.selects(code):
            continue
        suppressions = [suppression for suppression in selection.suppressions if suppression.rule == code]
        findings = list(rule.findings(_exclude_suppressed(facts, suppressions)))
        suppressed += [_apply_suppression(rule, facts, suppression, suppressions) for suppression in suppressions]
        for finding in findings:
            (baseline_findings if selection.in_baseline(finding) else new_findings).append(finding)
        if not findings and (reason := rule.not_judged_reason(facts) or next(iter(observer_failures(facts)), None)) is not None:
            not_judged[code] = reason
        elif not findings:
            clean.append(code)
    return Judgement(
        findings=tuple(_with_causes(new_findings)),
        baseline_findings=tuple(baseline_findings),
        clean=tuple(clean),
        not_judged=not_judged,
        suppressed=tuple(suppressed),
    )


def _with_causes(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings, each with the code of its cause if that is among them: at the same place, and failing."""
    places = {(finding.code, finding.where) for finding in findings if finding.severity in FAILING}
    for finding in findings:
        causes = (code for code in rules()[finding.code].consequence_of if (code, finding.where) in places)
        yield replace(finding, cause=next(causes, None))


def observer_failures(facts: Iterable[RankFacts]) -> list[str]:
    """Return a line for each rank whose observer failed: it may have missed what a rule looks for, and nothing is clean."""
    return [f"the observer failed on rank {rank.rank}: {rank.problems[0]}" for rank in facts if rank.problems]


def _filter_tensors(facts: Sequence[RankFacts], predicate: Callable[[Any], bool]) -> list[RankFacts]:
    """Return the facts with only those stepped tensors, parameters, buffers and averages for which the predicate is true."""
    return [
        replace(
            rank_facts,
            stepped=tuple(filter(predicate, rank_facts.stepped)),
            parameters=tuple(filter(predicate, rank_facts.parameters)),
            buffers=tuple(filter(predicate, rank_facts.buffers)),
            averages=tuple(filter(predicate, rank_facts.averages)),
        )
        for rank_facts in facts
    ]


def _exclude_suppressed(facts: Sequence[RankFacts], suppressions: Iterable[Suppression]) -> list[RankFacts]:
    """Return the facts without the tensors that match a suppression."""
    patterns = [suppression.parameters for suppression in suppressions]
    if not patterns:
        return list(facts)
    return _filter_tensors(facts, lambda tensor: not any(_matches(tensor, pattern) for pattern in patterns))


def _matches(tensor: Any, pattern: str) -> bool:
    """Return whether the tensor's name matches: of a partition all that it covers, of an average also its parameter."""
    covers = getattr(tensor, "covers", ()) or (getattr(tensor, "parameter", tensor.name),)
    return fnmatchcase(tensor.name, pattern) or all(fnmatchcase(name, pattern) for name in covers)


def _apply_suppression(
    rule: Rule, facts: Sequence[RankFacts], suppression: Suppression, suppressions: Sequence[Suppression]
) -> AppliedSuppression:
    """Determine the effect of one suppression among several of a rule.

    It has an effect if the rule gives other findings without it while the others stay in force. The tensors it suppresses are
    those the rule names when it is run on the matching tensors alone.
    """
    unsuppressed = _exclude_suppressed(facts, [item for item in suppressions if item is not suppression])
    effective = list(rule.findings(unsuppressed)) != list(rule.findings(_exclude_suppressed(facts, suppressions)))
    matching = _filter_tensors(unsuppressed, lambda tensor: _matches(tensor, suppression.parameters))
    evidence = [finding.evidence for finding in rule.findings(matching)] if effective else []
    names = dict.fromkeys(name for values in evidence for name in values.get("names", ()))
    return AppliedSuppression(
        code=rule.code,
        parameters=suppression.parameters,
        reason=suppression.reason,
        names=tuple(names)[:MAX_NAMES],
        matched=max(len(names) + sum(values.get("more", 0) for values in evidence), int(effective)),
    )
