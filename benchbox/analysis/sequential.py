"""Tests repeated while a run goes on: at which numbers of launches a run looks, and what each look may spend.

A test at 1% that is repeated after every launch is wrong far more often than once in a hundred. The looks are therefore fixed
before the first launch, at most K of them, and each spends alpha / K of the probability of a wrong verdict: alpha spending
with the function alpha * k / K at look k (Lan and DeMets, Biometrika 70, 1983). The probability that any look is wrong is at
most the sum over looks (Bonferroni), whatever their dependence, so that nothing is assumed about the launches. That is
conservative: looks at the same launches depend on one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.analysis.best_batches import compare_run
from benchbox.analysis.certificates import certificates
from benchbox.analysis.comparability import reference_pairs
from benchbox.analysis.inference import ALPHA, ONE_TEST, RELEVANT, Criteria, launches_to_settle
from benchbox.analysis.summary import summarize

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.analysis.comparability import Comparison
    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.run import Run

MAX_LOOKS = 6  # the number of launches doubles every two looks: the last has 5.7 times those of the first


def look_launches(pairs: int) -> tuple[int, ...]:
    """Return the number of launches of each cell at every look. At the first, a difference could settle all pairs."""
    first = launches_to_settle(pairs, alpha=ALPHA / MAX_LOOKS)
    return tuple(math.ceil(first * 2 ** (look / 2)) for look in range(MAX_LOOKS))


def criteria_of(run: Run) -> Criteria:
    """Return the criteria of the verdicts of a run: stricter ones where it looks several times."""
    if run.sequential is None:
        return ONE_TEST
    sequential = run.sequential
    return Criteria(
        alpha=ALPHA / len(sequential["looks"]),
        relevant=sequential["resolution"],
        complete=True,
        settled=sequential.get("settled", {}),
    )


def looks_taken(run: Run) -> int:
    """Return how many looks the launches of a plan have had. An older plan does not say it, but for the first look."""
    if run.sequential is None:
        return 0
    taken: int = run.sequential.get("looks_taken", int(run.launches >= run.sequential["looks"][0]))
    return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Verdicts after the launches of a look. Pairs that cannot be compared, as of a failed cell, are not waited for."""

    settled: tuple[Comparison, ...]
    unsettled: tuple[Comparison, ...]
    refused: tuple[Comparison, ...]


def look_at(run: Run, records: Iterable[LaunchRecord]) -> Look:
    """Judge all pairs of a run by the launches of its current look: of a run with walks, the fastest batches of each."""
    summaries = summarize(run, records)
    compared = compare_run(run, summaries, certificates(run, summaries), criteria_of(run))
    comparisons = compared.walks if run.walks else tuple(compared.cells.values())
    return Look(
        settled=tuple(comparison for comparison in comparisons if comparison.is_settled),
        unsettled=tuple(pair for pair in comparisons if pair.effect is not None and not pair.is_settled),
        refused=tuple(comparison for comparison in comparisons if comparison.effect is None),
    )


def plan_looks(run: Run, resolution: float = RELEVANT, *, search: bool = False) -> dict[str, Any]:
    """Return `Run.sequential` of a run that looks several times, from the pairs that its plan has.

    With `search` there is one launch more: the one that chose the fastest batch of a walk is not judged.
    """
    looks = look_launches(max(1, reference_pairs(run.cells.values(), run.reference)))
    return {
        "looks": [launches + search for launches in looks],
        "resolution": resolution,
        "looks_taken": 0,
        "launches": {},
        "settled": {},
    }
