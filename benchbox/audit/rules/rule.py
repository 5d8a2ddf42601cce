"""What a rule is, and the evidence that rules about stepped tensors share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from benchbox.audit.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchbox.audit.facts import Census, SteppedTensor

NAMES_SHOWN = 10


class Breach(NamedTuple):
    """What a rule's check found: how bad, where, and the evidence."""

    severity: Severity
    where: str
    rank: int
    evidence: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that must hold, with everything that is said about it when it does not."""

    code: str
    title: str
    severity: Severity  # the worst it can be
    why: str
    measured: str
    repair: str
    references: tuple[str, ...]
    check: Callable[[Sequence[Census]], Iterable[Breach]]

    def findings(self, censuses: Sequence[Census]) -> Iterator[Finding]:
        """The breaches, and one `unknown` for each optimizer that no census could read."""
        for breach in self.check(censuses):
            yield self._finding(breach, self.title, self.repair)
        for breach in _unknowns(censuses):
            yield self._finding(breach, f"cannot tell whether {self.title}", "audit the set-up with an optimizer that is known")

    def _finding(self, breach: Breach, title: str, repair: str) -> Finding:
        severity, where, rank, evidence = breach
        return Finding(code=self.code, severity=severity, title=title, where=where, rank=rank, evidence=evidence, repair=repair)


def _unknowns(censuses: Sequence[Census]) -> Iterator[Breach]:
    ranks: dict[tuple[str, str], list[int]] = {}
    for census in censuses:
        for opaque in census.opaque:
            ranks.setdefault((opaque.optimizer, opaque.reason), []).append(census.rank)
    for (optimizer, reason), seen in ranks.items():
        yield Breach("unknown", optimizer, min(seen), {"reason": reason, "ranks": sorted(seen)})


def stepped_evidence(found: Sequence[tuple[int, SteppedTensor]]) -> dict[str, Any]:
    """Who and how much: ranks, dtypes, tensors and elements of the rank with most of them, and up to ten names."""
    by_rank: dict[int, list[SteppedTensor]] = {}
    for rank, tensor in found:
        by_rank.setdefault(rank, []).append(tensor)
    names = list(dict.fromkeys(tensor.name for _, tensor in found))
    more = len(names) - NAMES_SHOWN
    return {
        "ranks": sorted(by_rank),
        "dtypes": sorted({tensor.dtype for _, tensor in found}),
        "tensors": max(len(held) for held in by_rank.values()),
        "elements": max(sum(tensor.elements for tensor in held) for held in by_rank.values()),
        "names": names[:NAMES_SHOWN] + ([f"and {more} more"] if more > 0 else []),
    }
