"""Rules, and the evidence that rules about stepped tensors share."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from benchbox.audit.findings import Finding, Severity
from benchbox.audit.names import fold_names
from benchbox.audit.repairs import select_repair
from benchbox.observer.facts import SECTIONS, SIXTEEN_BIT
from benchbox.observer.stepped_tensors import all_stepped_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from benchbox.observer.facts import RankFacts, SourceLocation, SteppedTensor, UpdateStatistics

MAX_NAMES = 10
_FEW_NAMES = 4  # read best as they are
_MAX_LOCATIONS = 3
# Kinds of locations that decide in which dtype weights and their state are stored.
CAST_OR_BUILT = ("cast", "default dtype", "optimizer")
# In smaller tensors all elements may be exact in bfloat16 by chance.
MIN_ELEMENTS = 64


class RuleViolation(NamedTuple):
    """Result of a rule's check: severity, place, the lowest affected rank, and the evidence in plain JSON values."""

    severity: Severity
    where: str
    rank: int
    evidence: dict[str, Any]
    title: str | None = None  # None: the title of the rule
    repair: str | None = None  # None: the repair of the rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One requirement on a training set-up, its check, and its documentation.

    `check` yields a violation for each finding. `sections` names the sections of the facts that it reads: if a rank did not
    observe one of them, and nothing is wrong with what was observed, the rule is not judged. Nor is it where `missing_evidence`
    returns a reason, because the sections were observed but do not answer the rule's question.
    """

    code: str
    title: str
    severity: Severity  # the worst it can be
    conditions: str = ""  # of each severity, where a finding may have another
    rationale: str
    measurement: str
    repair: str
    references: tuple[str, ...]
    sections: tuple[str, ...]
    consequence_of: tuple[str, ...] = ()  # codes of rules: where one of them fires as well, it is the cause
    repairs: Mapping[str, str] = field(default_factory=dict)  # by library, as in `benchbox.audit.repairs`
    afterwards: str = ""  # what is left to do after any of these repairs
    locations: tuple[str, ...] = ()  # kinds of locations that may be the cause, the likeliest first
    check: Callable[[Sequence[RankFacts]], Iterable[RuleViolation]]
    missing_evidence: Callable[[Sequence[RankFacts]], str | None] = lambda _: None

    def __post_init__(self) -> None:
        assert set(self.sections) <= SECTIONS.keys(), f"{self.code} reads unknown sections of the facts"

    def findings(self, facts: Sequence[RankFacts]) -> Iterator[Finding]:
        """Yield what the rule finds, with the repair for the library that trains."""
        of_rule = "; ".join(filter(None, (select_repair(self.repairs, facts) or self.repair, self.afterwards)))
        for severity, where, rank, evidence, title, repair in self.check(facts):
            yield Finding(
                code=self.code,
                severity=severity,
                title=title or self.title,
                where=where,
                rank=rank,
                evidence=evidence,
                repair=repair or of_rule,
                locations=tuple(self._locations(facts)),
            )

    def _locations(self, facts: Sequence[RankFacts]) -> Iterator[SourceLocation]:
        """Yield up to three locations that may have led to a finding; ranks run the same code."""
        locations = dict.fromkeys(
            location for rank_facts in facts for location in rank_facts.locations if location.kind in self.locations
        )
        yield from sorted(locations, key=lambda location: self.locations.index(location.kind))[:_MAX_LOCATIONS]

    def not_judged_reason(self, facts: Sequence[RankFacts]) -> str | None:
        """Return why this rule cannot be judged from these facts; None if it can."""
        if not facts:
            return "there are no facts"
        for section in self.sections:
            for rank_facts in facts:
                if section in rank_facts.missing:
                    return rank_facts.missing[section]
        return self.missing_evidence(facts)


def tensor_violations(
    facts: Sequence[RankFacts],
    severity: Callable[[SteppedTensor], Severity | None],
    evidence: Callable[[Sequence[SteppedTensor]], dict[str, Any]],
) -> Iterator[RuleViolation]:
    """Yield one violation for each optimizer and severity, over the stepped tensors of all ranks.

    Args:
        facts: of every rank.
        severity: of the violation by a tensor; None for a tensor that complies.
        evidence: measured values of the violating tensors, added to the evidence that every such rule gives.
    """
    graded = [(severity(tensor), rank, tensor) for rank, tensor in all_stepped_tensors(facts)]
    violating = [(level, rank, tensor) for level, rank, tensor in graded if level is not None]

    def key(item: tuple[Severity, int, SteppedTensor]) -> tuple[str, str]:
        return item[2].optimizer, item[0]

    for (optimizer, _), group in groupby(sorted(violating, key=key), key=key):  # stable: ranks and names stay in order
        items = list(group)
        level, lowest_rank, _ = items[0]
        tensors = [(rank, tensor) for _, rank, tensor in items]
        measured = evidence([tensor for _, tensor in tensors])
        yield RuleViolation(level, optimizer, lowest_rank, measured | stepped_evidence(tensors))


def share_violations(
    facts: Sequence[RankFacts], share: Callable[[SteppedTensor], float | None], label: str
) -> Iterator[RuleViolation]:
    """Yield an error for tensors with a share above zero, and the largest share by its label. It is None where all is well."""

    def severity(tensor: SteppedTensor) -> Severity | None:
        return "error" if (share(tensor) or 0.0) > 0.0 else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {label: round_share(max(share(tensor) or 0.0 for tensor in tensors))}

    return tensor_violations(facts, severity, evidence)


def is_lossy(tensor: SteppedTensor) -> bool:
    """Return whether the part of an update that rounding removes is lost for this tensor."""
    return tensor.dtype in SIXTEEN_BIT and tensor.compensation is None


def is_weight_rounded_between_steps(tensor: SteppedTensor) -> bool:
    """Return whether something rounds a float32 weight to bfloat16 after every step."""
    exact = tensor.dtype == "float32" and tensor.numbers.bf16_valued_later.get("weight") == 1.0
    return exact and seen_between_steps(tensor) and tensor.compensation is None


def seen_between_steps(tensor: SteppedTensor) -> bool:
    """Return whether weight and moments were compared with bfloat16 after observed steps that changed them."""
    numbers = tensor.numbers
    return (numbers.steps_before_later or 0) > (numbers.steps_before or 0) and tensor.elements >= MIN_ELEMENTS


def moments_rounded_between_steps(tensor: SteppedTensor) -> list[str]:
    """Return names of the float32 moments of Adam that something rounds to bfloat16 after every step."""
    if not seen_between_steps(tensor):
        return []
    # At a beta1 of 0 or 0.5 the first moment of a row that had one gradient is that gradient times a power of two.
    names = ["exp_avg", "exp_avg_sq"] if tensor.betas is None or tensor.betas[0] > 0.5 else ["exp_avg_sq"]
    shares = tensor.numbers.bf16_valued_later
    return [name for name in names if shares.get(name) == 1.0 and tensor.state.get(name) == "float32"]


def masters_uncompared(facts: Sequence[RankFacts], differing_share: Callable[[UpdateStatistics], float | None]) -> str | None:
    """Return that no master could be compared with its live parameter, if there are masters and none has a differing share."""
    masters = [tensor.numbers for _, tensor in all_stepped_tensors(facts) if not tensor.live]
    if masters and all(differing_share(numbers) is None for numbers in masters):
        return "no master could be compared with its live parameter"
    return None


def stepped_evidence(tensors: Sequence[tuple[int, SteppedTensor]]) -> dict[str, Any]:
    """Return ranks, dtypes, tensors and elements of the rank with most of them, and up to ten names, from (rank, tensor)."""
    by_rank: dict[int, list[SteppedTensor]] = {}
    for rank, tensor in tensors:
        by_rank.setdefault(rank, []).append(tensor)
    return {
        "ranks": sorted(by_rank),
        "dtypes": sorted({tensor.dtype for _, tensor in tensors}),
        "tensors": max(len(of_rank) for of_rank in by_rank.values()),
        "elements": max(sum(tensor.elements for tensor in of_rank) for of_rank in by_rank.values()),
        **names_evidence(tensor.name for _, tensor in tensors),
    }


def names_evidence(names: Iterable[str]) -> dict[str, Any]:
    """Return the evidence that names tensors: `names`, up to ten distinct ones, and in `more` the number of the others.

    `folded` stands for all of them, where that is shorter.
    """
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - MAX_NAMES
    folded = fold_names(distinct)
    return (
        {"names": distinct[:MAX_NAMES]}
        | ({"more": more} if more > 0 else {})
        | ({"folded": folded} if 2 * len(folded) <= len(distinct) > _FEW_NAMES and len(folded) <= MAX_NAMES else {})
    )


def abbreviate(texts: Iterable[str]) -> list[str]:
    """Return up to ten distinct texts, and a last entry that counts the others."""
    evidence = names_evidence(texts)
    return [*evidence["names"], *([f"and {evidence['more']} more"] if "more" in evidence else [])]


def rms_update(numbers: UpdateStatistics) -> float | None:
    """Return the root mean square of the computed updates; None if none was computed."""
    return (numbers.update_squared / numbers.updates) ** 0.5 if numbers.updates else None


def round_share(share: float) -> float:
    """Round a share to four decimal places, but never to 0 or 1 unless it is exactly that."""
    return min(max(round(share, 4), 0.0001), 0.9999) if 0.0 < share < 1.0 else share
