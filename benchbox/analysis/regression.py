"""Demands relative to a baseline: launches against launches where a metric has noise, value against value elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from benchbox.analysis.baseline_walks import fastest_batch, resolved_point
from benchbox.analysis.inference import ALPHA, can_settle, estimate_effect, launches_to_settle
from benchbox.analysis.noise import OF_STEP_TIMES, noise_floor
from benchbox.analysis.peak_changes import is_peak, raised_beyond_chance, why_unsettled
from benchbox.analysis.quantities import quantity
from benchbox.analysis.run_environments import memory_limit_difference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.analysis.inference import Effect
    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.metrics import Metric
    from benchbox.store.baseline import Baseline
    from benchbox.store.noise import Noise

DemandVerdict = Literal["ok", "inconclusive", "missing", "breach"]

_NOT_IN_BASELINE = "the baseline does not have it: promote a run of today's matrix"
_NO_LAUNCHES = "the baseline has no values of launches, as older ones: promote a run again"


@dataclass(frozen=True, slots=True)
class BaselineLookup:
    """The baseline to compare with, or why there is none and what to do about it."""

    baseline: Baseline | None
    remedy: str | None
    noise: Noise | None = None  # of this machine, where it was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionJudgement:
    """Verdict on one demand, with the texts that explain it."""

    expected: str
    actual: str
    verdict: DemandVerdict
    note: str | None = None


def has_noise(metric: Metric) -> bool:
    """Return whether a metric differs between launches by chance: not a worst value such as a peak, nor one of equality."""
    is_worst_or_exact = metric.launches == "worst" or metric.deterministic
    return metric.is_number and metric.direction != "none" and not is_worst_or_exact


def value_change(metric: Metric, before: float, after: float) -> float:
    """Return by how much a value without noise changed, relative to what it was; infinite from zero.

    A share changes by points: twice a millionth of lost updates is nothing.
    """
    size = abs(after - before)
    if metric.unit in ("fraction", "ratio") or not size:
        return size
    return size / abs(before) if before else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """A metric of a cell in the run or in the baseline: its value, and its launches as far as they are judged."""

    value: float
    by_launch: Mapping[int, float]
    batch: int | None = None  # of a walk of the baseline, where it is part of what is compared


def judge_regression(
    summary: CellSummary, metric: Metric, allowed: float, lookup: BaselineLookup, *, demands: int, of_walk: bool = False
) -> RegressionJudgement:
    """Judge whether a metric of a cell is within `allowed`, such as 0.05, of the baseline in the worse direction.

    A metric with noise is a breach when launches show that it is worse, and the estimate is by more than allowed; ok when its
    whole interval is within what is allowed; and inconclusive otherwise.

    Args:
        summary: a cell in which the metric has a value.
        demands: number of demands with noise in this gate. If nothing has changed, any breach has a probability of at most
            `ALPHA`, apart from a drift of the machine between the baseline and the run that its noise floor does not contain.
        of_walk: a batch of a walk, by its `repeats` if the metric has noise. The launch that searched is judged on neither
            side: it favours whatever chance made fast.
    """
    spread = summary.values[metric.name]
    assert spread is not None
    launches = summary.by_launch(metric)
    ours = _Side(value=spread.value, by_launch=_without_first(launches) if of_walk else launches)
    if lookup.baseline is None:
        return _not_compared(ours, metric, allowed, lookup.remedy)
    base = lookup.baseline.value(summary.cell_id, metric.name)
    if base is None:
        return _not_compared(ours, metric, allowed, _NOT_IN_BASELINE)
    values = lookup.baseline.by_launch(summary.cell_id, metric.name)
    if not values and has_noise(metric):
        return _not_compared(ours, metric, allowed, _NO_LAUNCHES)
    is_searched = of_walk or bool(lookup.baseline.is_of_walk(summary.cell_id))
    theirs = _repeated_side(base, values, metric) if is_searched else _Side(value=base, by_launch=values)
    return _judge(ours, theirs, metric, allowed, lookup, demands=demands, of_walk=is_searched)


def judge_fastest_batch(
    fastest: CellSummary,
    metric: Metric,
    allowed: float,
    lookup: BaselineLookup,
    *,
    demands: int,
    walks: Mapping[str, Mapping[int, str]],
    measure: Mapping[str, Any],
) -> RegressionJudgement:
    """Judge the fastest batch of a walk against the fastest one of the baseline, as `judge_regression` judges a cell.

    On both sides the launch that chose the batch is left out: it favours whatever chance made fast.

    Args:
        fastest: the batch, by its `repeats` if the metric has noise, in which the metric has a value.
        walks: those of the baseline, as `baseline_walks` returns them.
        measure: of the run, whose memory limit must be that of the baseline.
    """
    spread = fastest.values[metric.name]
    assert spread is not None
    ours = _Side(value=spread.value, by_launch=_without_first(fastest.by_launch(metric)))
    if lookup.baseline is None:
        return _not_compared(ours, metric, allowed, lookup.remedy)
    if difference := memory_limit_difference(measure, lookup.baseline.measure):
        return _not_compared(ours, metric, allowed, f"{difference} of the baseline: promote a run of today's limit")
    batches = walks.get(resolved_point(fastest.cell))
    if not batches:
        return _not_compared(ours, metric, allowed, _NOT_IN_BASELINE)
    batch = fastest_batch(lookup.baseline, batches)
    if batch is None:
        return _not_compared(ours, metric, allowed, _NO_LAUNCHES)
    base = lookup.baseline.value(batches[batch], metric.name)
    values = lookup.baseline.by_launch(batches[batch], metric.name)
    if base is None or not values:
        return _not_compared(ours, metric, allowed, _NOT_IN_BASELINE)
    theirs = replace(_repeated_side(base, values, metric), batch=batch)
    return _judge(ours, theirs, metric, allowed, lookup, demands=demands, of_walk=True)


def _repeated_side(value: float, launches: Mapping[int, float], metric: Metric) -> _Side:
    """Return a batch of a walk of the baseline by the launches that did not search, where the metric has noise."""
    if not has_noise(metric):
        return _Side(value=value, by_launch=launches)
    judged = _without_first(launches)
    return _Side(value=median((judged or launches).values()), by_launch=judged)


def _without_first(launches: Mapping[int, float]) -> dict[int, float]:
    return {number: value for number, value in launches.items() if number > 1}


def _not_compared(ours: _Side, metric: Metric, allowed: float, note: str | None) -> RegressionJudgement:
    actual = quantity(ours.value, metric.unit, digits=4)
    expected = f"within {allowed * 100:g}% of the baseline"
    return RegressionJudgement(expected=expected, actual=actual, verdict="missing", note=note)


def _judge(
    ours: _Side,
    theirs: _Side,
    metric: Metric,
    allowed: float,
    lookup: BaselineLookup,
    *,
    demands: int,
    of_walk: bool,
) -> RegressionJudgement:
    actual = quantity(ours.value, metric.unit, digits=4)
    expected, low, high = _allowed_range(metric, theirs, allowed)
    values = [ours.value, theirs.value, *ours.by_launch.values(), *theirs.by_launch.values()]
    if not has_noise(metric):
        verdict: DemandVerdict = "ok" if low <= ours.value <= high else "breach"
        note = None
        if verdict == "breach" and is_peak(metric) and not raised_beyond_chance(theirs.value, ours.value):
            note = why_unsettled(theirs.by_launch.values(), ours.by_launch.values(), allowed)
            verdict = "inconclusive" if note else verdict
        return RegressionJudgement(expected=expected, actual=actual, verdict=verdict, note=note)
    if not any(values):
        return RegressionJudgement(expected=expected, actual=actual, verdict="ok")
    if min(values) <= 0:
        note = "launches are tested by the ratios of their values, and one is not above zero"
        return RegressionJudgement(expected=expected, actual=actual, verdict="inconclusive", note=note)
    if not (ours.by_launch and theirs.by_launch):
        reason = _too_few((len(ours.by_launch), len(theirs.by_launch)), demands, of_walk)
        return RegressionJudgement(expected=expected, actual=actual, verdict="inconclusive", note=reason)
    worse, better = (ours, theirs) if metric.direction == "lower" else (theirs, ours)
    effect = estimate_effect(worse.by_launch, better.by_launch, alpha=ALPHA / demands, same_run=False)
    # Of throughput, a fall by a share is a rise of the time of a sample by more than that share.
    factor = 1 + allowed if metric.direction == "lower" else 1 / (1 - allowed) if allowed < 1 else math.inf
    verdict, note = _verdict(effect, factor)
    if effect.low is None:
        note = _too_few((len(ours.by_launch), len(theirs.by_launch)), demands, of_walk)
    if verdict == "breach" and lookup.noise is not None and metric.name in OF_STEP_TIMES:
        # The machine may have drifted since the baseline, which no test of their launches sees.
        floor = noise_floor(lookup.noise, min(effect.launches))
        if effect.ratio < 1 + floor:
            verdict, note = "inconclusive", f"the difference is within the noise floor of this machine, {floor:.1%}"
    actual = f"{actual} ({_describe(effect, metric)})"
    return RegressionJudgement(expected=expected, actual=actual, verdict=verdict, note=note)


def _allowed_range(metric: Metric, theirs: _Side, allowed: float) -> tuple[str, float, float]:
    """Return the demand as text, and the lowest and highest value it allows."""

    def number(value: float) -> str:
        return quantity(value, metric.unit, digits=4)

    base, infinity = theirs.value, float("inf")
    worse, better = base + allowed * abs(base), base - allowed * abs(base)
    percent = f"{allowed * 100:g}%"
    baseline = f"baseline {number(base)}" + (f" at batch {theirs.batch}" if theirs.batch is not None else "")
    if metric.direction == "lower":
        return f"<= {number(worse)} ({baseline} + {percent})", -infinity, worse
    if metric.direction == "higher":
        return f">= {number(better)} ({baseline} - {percent})", better, infinity
    return f"{number(better)} .. {number(worse)} ({baseline} +- {percent})", better, worse


def _verdict(effect: Effect, factor: float) -> tuple[DemandVerdict, str | None]:
    """Return the verdict on an effect above 1 where the cell is worse, at most `factor`, and a note if it is inconclusive."""
    if effect.low is None or effect.high is None:
        return "inconclusive", None
    if effect.low > 1 and effect.ratio > factor:
        return "breach", None
    if effect.high <= factor:
        return "ok", None
    return "inconclusive", "launches do not settle whether it is worse: a new run of more launches, or a quieter host, can"


def _too_few(launches: tuple[int, int], demands: int, of_walk: bool) -> str:
    """Return how many launches can settle a demand for which there is no interval."""
    ours, theirs = launches
    needed = launches_to_settle(demands)
    if can_settle(launches, demands):
        return f"no number of launches settles {demands} demands: leave some out (`where`)"
    if of_walk:
        judged = f"{ours} and {theirs} launches after the one that chose the batch"
        return f"{judged} cannot settle it: {needed} can, `--launches {needed + 1}` of the run and of the baseline"
    return f"{ours} and {theirs} launches cannot settle it: {needed} of the run and of the baseline can"


def _describe(effect: Effect, metric: Metric) -> str:
    """Return the change of the metric, and its interval from the least worse to the worst, relative to the baseline."""

    def change(ratio: float) -> float:
        return ratio - 1 if metric.direction == "lower" else 1 - 1 / ratio

    text = f"{abs(change(effect.ratio)):.1%} {'worse' if effect.ratio >= 1 else 'better'}"
    if effect.low is None or effect.high is None:
        return text
    return f"{text}, {change(effect.low):+.1%} to {change(effect.high):+.1%}"
