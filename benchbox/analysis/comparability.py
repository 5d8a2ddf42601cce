"""Throughput ratios of cells, with verdicts. Only cells that differ in the named axis and in nothing else get one."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

from benchbox.analysis.adam_state import adam_dtypes
from benchbox.analysis.inference import (
    ONE_TEST,
    Criteria,
    Effect,
    Verdict,
    estimate_effect,
    holm,
    launches_to_settle,
)
from benchbox.analysis.run_environments import (
    ADDED_KEYS,
    ENVIRONMENT_KEYS,
    FIELD_OF_KEY,
    environment_value,
    value_text,
    without_threads,
)
from benchbox.analysis.summary import MISSING, short_label
from benchbox.registry.metrics import metric_by_name

if TYPE_CHECKING:
    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import LaunchRecord

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Throughput of one cell as a multiple of another's, with its verdict, or the reason why that number would mislead.

    Of an improvement or a regression launches show that the cells differ, at a p of at most `criteria.alpha` after Holm's
    correction for the number of pairs, and the estimate of the difference is at least `criteria.relevant`. Of a neutral pair
    the interval that holds for all pairs at once is within what is relevant. Any other is inconclusive.
    """

    axis: tuple[str, ...]
    subject: CellSummary
    reference: CellSummary | None
    verdict: Verdict
    effect: Effect | None = None  # None: incomparable or missing
    reason: str | None = None  # why there is no effect
    criteria: Criteria = ONE_TEST
    more_launches: int | None = None  # of each cell, before any difference could settle the pair; None: there are enough
    is_search: bool = False  # the launches are those by which walks chose their batches, and settle nothing
    of_walks: bool = False  # each at its fastest batch, in which they may differ too

    @property
    def ratio(self) -> float | None:
        return None if self.effect is None else self.effect.ratio

    @property
    def pair_id(self) -> str:
        """Ids of both cells: one cell may be compared with several."""
        return f"{self.subject.cell_id}/{self.reference.cell_id if self.reference else ''}"

    @property
    def is_settled(self) -> bool:
        return self.verdict in ("improvement", "neutral", "regression")


def reference_axis(reference: Mapping[str, Any], axes: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """Return the fields that a matrix's `reference` compares along, and why they are not a single axis, if they are not.

    Several fields count as one axis only when the matrix moves them together (a zipped axis).
    """
    fields = tuple(reference)
    if len(fields) <= 1:
        return fields, None
    zipped = (
        set(values[0]) for values in axes.values() if isinstance(values, list) and values and isinstance(values[0], Mapping)
    )
    if any(set(fields) <= keys for keys in zipped):
        return fields, None
    return fields, f"the reference differs in {len(fields)} axes at once: {', '.join(fields)}"


def reference_pairs(cells: Collection[Mapping[str, Any]], reference: Mapping[str, Any]) -> int:
    """Return how many cells have a counterpart with the values of the reference and all else equal."""
    others = [cell for cell in cells if not reference.items() <= cell.items()]
    keys = {_key(cell) for cell in cells}
    return sum(_key({**cell, **reference}) in keys for cell in others)


def _key(cell: Mapping[str, Any]) -> str:
    """Return a text by which a cell is found among many."""
    return json.dumps(cell, sort_keys=True)


def pairs_with_reference(
    summaries: Sequence[CellSummary], reference: Mapping[str, Any]
) -> list[tuple[CellSummary, CellSummary | None]]:
    """Return every cell that is not itself a reference, with the one that equals it except on the reference's axis."""
    by_cell = {_key(summary.cell): summary for summary in summaries}
    return [
        (summary, by_cell.get(_key({**summary.cell, **reference})))
        for summary in summaries
        if not reference.items() <= summary.cell.items()
    ]


def compare_pair(
    subject: CellSummary,
    reference: CellSummary | None,
    axis: tuple[str, ...],
    obstacle: str | None,
    criteria: Criteria,
    pairs: int,
) -> Comparison:
    """Compare two cells along `axis`, without a verdict where they can be compared: `with_verdicts` gives those of all pairs.

    Args:
        obstacle: why they may not be compared.
        pairs: of the table.
    """
    reason = obstacle
    if reason is None and reference is None:
        reason = f"no cell differs from it in {' and '.join(axis)} only"
    if reason is None and reference is not None:
        reason = why_incomparable(subject, reference, axis)
    if reason is not None or reference is None:
        is_missing = MISSING in (subject.status, reference.status if reference else None)
        verdict: Verdict = "missing" if is_missing else "incomparable"
        return Comparison(axis=axis, subject=subject, reference=reference, verdict=verdict, reason=reason)
    if reason := why_not_judged(subject, reference, criteria):
        return Comparison(
            axis=axis, subject=subject, reference=reference, verdict="inconclusive", reason=reason, criteria=criteria
        )
    effect = throughput_effect(subject, reference, criteria, pairs)
    return Comparison(axis=axis, subject=subject, reference=reference, verdict="inconclusive", effect=effect, criteria=criteria)


def why_not_judged(subject: CellSummary, reference: CellSummary, criteria: Criteria) -> str | None:
    """Return why a pair is not judged yet, or None: where launches are judged together, all must be there."""
    if not criteria.complete or (subject.complete and reference.complete):
        return None
    return f"{subject.planned} launches of both cells are judged together, and some are missing"


def throughput_effect(subject: CellSummary, reference: CellSummary, criteria: Criteria, pairs: int) -> Effect:
    """Return the ratio of the throughputs of two comparable cells, by their common rounds if there are any.

    Launches beyond those, as of a reference that goes on for its other pairs, have no counterpart that was measured at the same
    time; nor have those that are of no common round, as one that was repeated on another day.

    Args:
        pairs: of the table.
    """
    metric = metric_by_name("global_samples_per_s")
    ours, theirs = (summary.by_launch(metric) for summary in (subject, reference))
    rounds = _common_rounds(subject, reference) & ours.keys() & theirs.keys()
    if not rounds:
        return estimate_effect(ours, theirs, alpha=criteria.alpha, pairs=pairs, same_run=False)
    sides = ({number: side[number] for number in sorted(rounds)} for side in (ours, theirs))
    return estimate_effect(*sides, alpha=criteria.alpha, pairs=pairs)


def _common_rounds(subject: CellSummary, reference: CellSummary) -> set[int]:
    """Return the numbers of the launches that both cells have, and between which none of them was launched."""
    launches = sorted((record["started_at"], record["launch"]) for summary in (subject, reference) for record in summary.ok)
    return {number for (_, number), (_, following) in pairwise(launches) if number == following}


def with_verdicts(comparisons: Mapping[_Key, Comparison], criteria: Criteria) -> dict[_Key, Comparison]:
    """Return the comparisons of a table, by any key, with verdicts that hold for all its pairs at once."""
    effects = {key: comparison.effect for key, comparison in comparisons.items() if comparison.effect is not None}
    adjusted = dict(zip(effects, holm([effect.p for effect in effects.values()]), strict=True))
    needed = launches_to_settle(max(1, len(effects)), alpha=criteria.alpha)
    verdicts = {}
    for key, comparison in comparisons.items():
        if comparison.effect is not None and comparison.is_search:
            comparison = replace(comparison, more_launches=needed)
        elif comparison.effect is not None:
            settled = criteria.settled.get(comparison.pair_id)
            verdict = settled or verdict_of_effect(comparison.effect, adjusted[key], criteria)
            missing = needed - min(comparison.effect.launches)
            more = missing if verdict == "inconclusive" and missing > 0 else None
            comparison = replace(comparison, verdict=verdict, more_launches=more)
        verdicts[key] = comparison
    return verdicts


def verdict_of_effect(effect: Effect, adjusted_p: float | None, criteria: Criteria) -> Verdict:
    """Return the verdict on an effect that is above 1 for the better, by its p after Holm's correction."""
    relevant = 1 + criteria.relevant
    if effect.low is None or effect.high is None or adjusted_p is None:
        return "inconclusive"
    # The estimate is a median and the test is of means: with launches of two kinds they may lie on different sides.
    if adjusted_p <= criteria.alpha and effect.ratio >= relevant and effect.low > 1:
        return "improvement"
    if adjusted_p <= criteria.alpha and effect.ratio <= 1 / relevant and effect.high < 1:
        return "regression"
    if effect.joint_low is not None and effect.joint_low > 1 / relevant and cast("float", effect.joint_high) < relevant:
        return "neutral"
    return "inconclusive"


def why_incomparable(subject: CellSummary, reference: CellSummary, axis: Collection[str]) -> str | None:
    """Return the reason why a ratio of two cells along `axis` would mislead, or None when they are comparable."""
    different = [field for field in subject.cell if field not in axis and subject.cell[field] != reference.cell.get(field)]
    if different:
        return f"they also differ in {', '.join(different)}"
    for summary in (subject, reference):
        if summary.status != "ok":
            divergence = f": {summary.divergence}" if summary.divergence else ""
            return f"{_name(summary, axis)} is {summary.status}{divergence}"
    for summary in (subject, reference):
        if summary.values["global_samples_per_s"] is None:
            return f"{_name(summary, axis)} has no throughput"
        if (key := _differing_key(summary)) is not None:
            return f"launches of {_name(summary, axis)} differ in {key}"
    if _not_in_turns(subject, reference):
        return "most of their launches were not measured in turns: --fresh measures both again"
    assert subject.evidence is not None
    assert reference.evidence is not None
    reference_values = _controlled_values(reference.evidence, axis)
    for name, subject_value in _controlled_values(subject.evidence, axis).items():
        reference_value = reference_values[name]
        if name in ADDED_KEYS and None in (subject_value, reference_value):
            continue
        if subject_value != reference_value:
            return f"they also differ in {name}: {value_text(name, subject_value)} against {value_text(name, reference_value)}"
    return None


def _not_in_turns(subject: CellSummary, reference: CellSummary) -> bool:
    """Return whether fewer than half of the launches that two cells have are of common rounds: the machine may have changed."""
    launches = [{record["launch"] for record in summary.ok} for summary in (subject, reference)]
    common = set.intersection(*launches)
    return 2 * len(_common_rounds(subject, reference)) < len(common)


def _differing_key(summary: CellSummary) -> str | None:
    """Return the first key of the environment in which ok launches of a cell differ: part of them were measured elsewhere."""
    records = list({id(record["environment"]): record for record in summary.ok}.values())
    for key in ENVIRONMENT_KEYS if len(records) > 1 else ():
        values = [value for record in records if (value := environment_value(record["environment"], key)) is not None]
        if any(value != values[0] for value in values):
            return key
    return None


def _controlled_values(record: LaunchRecord, axis: Collection[str]) -> dict[str, Any]:
    """Return the observed values, by name, that must be equal on both sides whatever was requested."""
    observed = record["observed"]
    values: dict[str, Any] = {"measured steps": record["steps"]}
    if "attention" not in axis:
        values["the attention kernel that ran"] = observed["attention_kernel"] if observed else None
    if "checkpointing" not in axis:
        values["checkpointed modules"] = bool(observed and observed["checkpointed_modules"])
    if "recipe" not in axis:
        values["Adam state"] = ", ".join(adam_dtypes(record)) or None
    environment: Mapping[str, Any] | None = record["environment"]
    if "world_size" in axis and environment:  # fewer ranks have more threads each: that is part of what is compared
        environment = without_threads(environment)
    keys = (key for key in ENVIRONMENT_KEYS if FIELD_OF_KEY.get(key) not in axis)
    return values | {key: environment_value(environment, key) for key in keys}


def _name(summary: CellSummary, axis: Collection[str]) -> str:
    return short_label(summary.cell, axis)
