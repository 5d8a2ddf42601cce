"""Demands relative to a baseline: launches against launches where a metric has noise, value against value elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchbox.analysis.inference import ALPHA, can_settle, estimate_effect, launches_to_settle
from benchbox.analysis.noise import noise_floor
from benchbox.analysis.quantities import quantity

if TYPE_CHECKING:
    from benchbox.analysis.inference import Effect
    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.metrics import Metric
    from benchbox.store.baseline import Baseline
    from benchbox.store.noise import Noise

Verdict = Literal["ok", "inconclusive", "missing", "breach"]


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
    verdict: Verdict
    note: str | None = None


def has_noise(metric: Metric) -> bool:
    """Return whether a metric differs between launches by chance: not a worst value such as a peak, nor one of equality."""
    is_worst_or_exact = metric.launches == "worst" or metric.deterministic
    return metric.is_number and metric.direction != "none" and not is_worst_or_exact


def judge_regression(
    summary: CellSummary, metric: Metric, allowed: float, lookup: BaselineLookup, *, demands: int
) -> RegressionJudgement:
    """Judge whether a metric of a cell is within `allowed`, such as 0.05, of the baseline in the worse direction.

    A metric with noise is a breach when launches show that it is worse, and the estimate is by more than allowed; ok when its
    whole interval is within what is allowed; and inconclusive otherwise.

    Args:
        summary: a cell in which the metric has a value.
        demands: number of demands with noise in this gate. If nothing has changed, any breach has a probability of at most
            `ALPHA`, apart from a drift of the machine between the baseline and the run that its noise floor does not contain.
    """
    spread = summary.values[metric.name]
    assert spread is not None
    actual = quantity(spread.value, metric.unit, digits=4)
    expected = f"within {allowed * 100:g}% of the baseline"
    if lookup.baseline is None:
        return RegressionJudgement(expected=expected, actual=actual, verdict="missing", note=lookup.remedy)
    base = lookup.baseline.value(summary.cell_id, metric.name)
    if base is None:
        note = "the baseline does not have it: promote a run of today's matrix"
        return RegressionJudgement(expected=expected, actual=actual, verdict="missing", note=note)
    expected, low, high = _allowed_range(metric, base, allowed)
    ours, theirs = summary.by_launch(metric), lookup.baseline.by_launch(summary.cell_id, metric.name)
    if not has_noise(metric) or min(spread.value, base) <= 0 or min([*ours.values(), *theirs.values()], default=0) <= 0:
        return RegressionJudgement(expected=expected, actual=actual, verdict="ok" if low <= spread.value <= high else "breach")
    if not theirs:
        note = "the baseline has no values of launches, as older ones: promote a run again"
        return RegressionJudgement(expected=expected, actual=actual, verdict="missing", note=note)
    worse, better = (ours, theirs) if metric.direction == "lower" else (theirs, ours)
    effect = estimate_effect(worse, better, alpha=ALPHA / demands, same_run=False)
    # Of throughput, a fall by a share is a rise of the time of a sample by more than that share.
    factor = 1 + allowed if metric.direction == "lower" else 1 / (1 - allowed) if allowed < 1 else math.inf
    verdict, reason = _verdict(effect, factor, demands)
    if verdict == "breach" and lookup.noise is not None:
        # The machine may have drifted since the baseline, which no test of their launches sees.
        floor = noise_floor(lookup.noise, min(effect.launches))
        if effect.ratio < 1 + floor:
            verdict, reason = "inconclusive", f"the difference is within the noise floor of this machine, {floor:.1%}"
    actual = f"{actual} ({_describe(effect, metric)})"
    return RegressionJudgement(expected=expected, actual=actual, verdict=verdict, note=reason)


def _allowed_range(metric: Metric, base: float, allowed: float) -> tuple[str, float, float]:
    """Return the demand as text, and the lowest and highest value it allows."""

    def number(value: float) -> str:
        return quantity(value, metric.unit, digits=4)

    worse, better, infinity = base + allowed * abs(base), base - allowed * abs(base), float("inf")
    percent = f"{allowed * 100:g}%"
    if metric.direction == "lower":
        return f"<= {number(worse)} (baseline {number(base)} + {percent})", -infinity, worse
    if metric.direction == "higher":
        return f">= {number(better)} (baseline {number(base)} - {percent})", better, infinity
    return f"{number(better)} .. {number(worse)} (baseline {number(base)} +- {percent})", better, worse


def _verdict(effect: Effect, factor: float, demands: int) -> tuple[Verdict, str | None]:
    """Return the verdict on an effect above 1 where the cell is worse, at most `factor`, and a note if it is inconclusive."""
    if effect.low is None or effect.high is None:
        ours, theirs = effect.launches
        needed = launches_to_settle(demands)
        if can_settle(effect.launches, demands):
            return "inconclusive", f"no number of launches settles {demands} demands: leave some out (`where`)"
        return "inconclusive", f"{ours} and {theirs} launches cannot settle it: {needed} of the run and of the baseline can"
    if effect.low > 1 and effect.ratio > factor:
        return "breach", None
    if effect.high <= factor:
        return "ok", None
    return "inconclusive", "launches do not settle whether it is worse: a new run of more launches, or a quieter host, can"


def _describe(effect: Effect, metric: Metric) -> str:
    """Return the change of the metric, and its interval from the least worse to the worst, relative to the baseline."""

    def change(ratio: float) -> float:
        return ratio - 1 if metric.direction == "lower" else 1 - 1 / ratio

    text = f"{abs(change(effect.ratio)):.1%} {'worse' if effect.ratio >= 1 else 'better'}"
    if effect.low is None or effect.high is None:
        return text
    return f"{text}, {change(effect.low):+.1%} to {change(effect.high):+.1%}"
