"""What a rule is, and the evidence that rules about stepped tensors share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from benchbox.audit.findings import Finding, Severity
from benchbox.observer.facts import SECTIONS, all_stepped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchbox.observer.facts import UpdateStatistics, RankFacts, SteppedTensor

MAX_NAMES = 10
SIXTEEN_BIT = frozenset({"bfloat16", "float16"})
# Said with every repair that lets lost updates arrive: it changes the training.
RETUNE = (
    "then tune the learning rate again: updates that were lost now arrive (AReaL#1634 scored 0.733 at the old rate of 1.7e-5 "
    "after such a repair, and 0.838 at 6e-6)"
)


class RuleViolation(NamedTuple):
    """What a rule's check found: how bad, where, the lowest rank that shows it, and the evidence in plain JSON values."""

    severity: Severity
    where: str
    rank: int
    evidence: dict[str, Any]
    title: str | None = None  # where it is not the rule's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that must hold, with everything that is said about it when it does not.

    `reads` names the sections of the facts that it looks at: where a rank did not see one of them, and nothing is wrong with
    what was seen, the rule is not judged. Nor is it where `blind` gives a reason: what was seen does not say what it asks.
    """

    code: str
    title: str
    severity: Severity  # the worst it can be
    rationale: str
    measurement: str
    repair: str
    references: tuple[str, ...]
    sections: tuple[str, ...]
    check: Callable[[Sequence[RankFacts]], Iterable[RuleViolation]]
    missing_evidence: Callable[[Sequence[RankFacts]], str | None] = lambda _: None

    def __post_init__(self) -> None:
        assert set(self.sections) <= SECTIONS.keys(), f"{self.code} reads what is no section of the facts"

    def findings(self, facts: Sequence[RankFacts]) -> Iterator[Finding]:
        for severity, where, rank, evidence, title in self.check(facts):
            yield Finding(
                code=self.code,
                severity=severity,
                title=title or self.title,
                where=where,
                rank=rank,
                evidence=evidence,
                repair=self.repair,
            )

    def not_judged_reason(self, facts: Sequence[RankFacts]) -> str | None:
        """Why this rule cannot be judged from these facts; None if it can."""
        if not facts:
            return "there are no facts"
        missing = next((each.missing[section] for section in self.sections for each in facts if section in each.missing), None)
        return missing or self.missing_evidence(facts)


def breaches(
    judged: Iterable[tuple[Severity | None, int, SteppedTensor]], evidence: Callable[[Sequence[SteppedTensor]], dict[str, Any]]
) -> Iterator[RuleViolation]:
    """One breach an optimizer and severity, from (severity or None, rank, tensor); `evidence` adds what the rule measured."""
    found = [(severity, rank, tensor) for severity, rank, tensor in judged if severity is not None]

    def key(item: tuple[Severity, int, SteppedTensor]) -> tuple[str, str]:
        return item[2].optimizer, item[0]

    for (optimizer, _), group in groupby(sorted(found, key=key), key=key):  # stable: ranks and names stay in order
        items = list(group)
        held = [(rank, tensor) for _, rank, tensor in items]
        yield RuleViolation(
            items[0][0], optimizer, items[0][1], evidence([tensor for _, tensor in held]) | stepped_evidence(held)
        )


def judged(
    facts: Sequence[RankFacts], severity: Callable[[SteppedTensor], Severity | None]
) -> Iterator[tuple[Severity | None, int, SteppedTensor]]:
    """Every stepped tensor of every rank with the severity of what is wrong with it."""
    for rank, tensor in all_stepped(facts):
        yield severity(tensor), rank, tensor


def is_lossy(tensor: SteppedTensor) -> bool:
    """Whether what rounding takes from an update of this tensor is gone."""
    return tensor.dtype in SIXTEEN_BIT and tensor.compensation is None


def stepped_evidence(found: Sequence[tuple[int, SteppedTensor]]) -> dict[str, Any]:
    """Who and how much: ranks, dtypes, tensors and elements of the rank with most of them, and up to ten names."""
    by_rank: dict[int, list[SteppedTensor]] = {}
    for rank, tensor in found:
        by_rank.setdefault(rank, []).append(tensor)
    return {
        "ranks": sorted(by_rank),
        "dtypes": sorted({tensor.dtype for _, tensor in found}),
        "tensors": max(len(held) for held in by_rank.values()),
        "elements": max(sum(tensor.elements for tensor in held) for held in by_rank.values()),
        **names_evidence(tensor.name for _, tensor in found),
    }


def names_evidence(names: Iterable[str]) -> dict[str, Any]:
    """The evidence that names tensors: `names`, up to ten and each once, and in `more` how many others there are."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - MAX_NAMES
    return {"names": distinct[:MAX_NAMES]} | ({"more": more} if more > 0 else {})


def abbreviate(words: Iterable[str]) -> list[str]:
    """Up to ten words, each once, and how many more there are."""
    held = names_evidence(words)
    return [*held["names"], *([f"and {held['more']} more"] if "more" in held else [])]


def rms_update(numbers: UpdateStatistics) -> float | None:
    """Root mean square of the updates that were computed; None if none was."""
    return (numbers.update_squared / numbers.updates) ** 0.5 if numbers.updates else None


def round_share(share: float) -> float:
    """A share to four places; never 0 or 1 of what is not none or all."""
    return min(max(round(share, 4), 0.0001), 0.9999) if 0.0 < share < 1.0 else share
