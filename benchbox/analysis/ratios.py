"""Ratios of benchmarks against those of a baseline: how far one more run of the tests may lie from those it has.

The allowed deviation comes from the spread of the runs. For logarithms of a ratio with standard deviation s over n runs of the
baseline, the mean of m further runs lies within t(1 - alpha / k, n - 1) * s * sqrt(1 / m + 1 / n) of the baseline's mean with
probability 1 - alpha, on one side and for k ratios together (a prediction interval: Hahn, Journal of the American Statistical
Association 64, 1969; k ratios by Bonferroni). Where both sides have several runs, s is pooled over them.

The formula takes runs as independent. Those of one afternoon on one host are closer to one another than to those of another day
or of another host of the same name, so a baseline that is to hold there needs runs of several days.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from benchbox.analysis.baseline import slug
from benchbox.analysis.changes import Change, RunComparison
from benchbox.analysis.gate import GateRow
from benchbox.analysis.inference import ALPHA, RELEVANT
from benchbox.errors import ConfigurationError, RecordError
from benchbox.store.baseline import baseline_path
from benchbox.store.benchmarks import Benchmarks, MeasuredRatio, read_benchmarks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from benchbox.analysis.gate import GateVerdict
    from benchbox.analysis.inference import Verdict

MIN_RUNS = 5  # of the tests for a baseline: with fewer, hardly any deviation is beyond what chance may do
BASELINE_NAME = "perf"  # of the file in the folder of a machine
_GATE_VERDICTS: Mapping[Verdict, GateVerdict] = {
    "regression": "breach",
    "improvement": "ok",
    "neutral": "ok",
    "missing": "missing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioJudgement:
    """A ratio of `head` against that of `base`. Values are geometric means over runs; `limit` is the worst that is allowed."""

    test: str
    name: str
    better: str
    base: float | None
    head: float | None
    limit: float | None
    tolerance: float | None  # 0.08: 8% worse than the base is allowed
    runs: tuple[int, int]
    verdict: Verdict
    reason: str | None = None


def merge_runs(runs: Sequence[Benchmarks]) -> Benchmarks:
    """Return runs of the same tests on one machine, some of them perhaps in a baseline already, as the content of a baseline.

    The last of them says which ratios there are. A baseline among them may be older than some, and has values of the others.

    Raises:
        RecordError: they are too few, of several machines, one of them is given twice, or single runs differ in their ratios.
    """
    started = [time for run in runs for time in run.started_at]
    if len(started) < MIN_RUNS:
        counted = f"{len(started)} runs of the tests show too little of their spread"
        raise RecordError(f"{counted}: a baseline needs {MIN_RUNS} or more")
    if len(machines := {slug(run.machine) for run in runs}) > 1:
        raise RecordError(f"these files were measured on several machines: {', '.join(sorted(machines))}")
    if len(set(started)) < len(started):
        raise RecordError("two of these files are of the same run of the tests")
    by_run = [{(ratio.test, ratio.name): ratio for ratio in run.ratios} for run in runs]
    latest = by_run[-1]
    if not latest:
        raise RecordError("these files have no ratios: a test records them in benchmark.extra_info['ratios']")
    for run, ratios in zip(runs, by_run, strict=True):
        if len(run.started_at) == 1 and (different := sorted(latest.keys() ^ ratios.keys())):
            raise RecordError(f"not every file has the ratio {different[0][1]} of {different[0][0]}")
    merged = [
        replace(ratio, values=tuple(value for ratios in by_run if key in ratios for value in ratios[key].values), rounds=())
        for key, ratio in latest.items()
    ]
    if few := [ratio for ratio in merged if len(ratio.values) < MIN_RUNS]:
        counted = f"{len(few[0].values)} runs have the ratio {few[0].name} of {few[0].test}"
        raise RecordError(f"{counted}, which is new: a baseline needs {MIN_RUNS} or more")
    return replace(runs[-1], started_at=tuple(started), ratios=tuple(merged), timings=())


def judge_ratios(
    base: Benchmarks, head: Benchmarks, *, relevant: float = RELEVANT, alpha: float = ALPHA
) -> list[RatioJudgement]:
    """Return a judgement on every ratio, in the order of `head`, then those that only `base` has.

    Args:
        relevant: relative change up to which there is none.
        alpha: probability with which any ratio is judged to be worse, or to be better, if none has changed.
    """
    befores = {(ratio.test, ratio.name): ratio for ratio in base.ratios}
    afters = {(ratio.test, ratio.name): ratio for ratio in head.ratios}
    tested = len(befores.keys() & afters.keys())
    keys = [*afters, *(key for key in befores if key not in afters)]
    refusal = None
    if slug(base.machine) != slug(head.machine):
        refusal = f"measured on {slug(base.machine)} and on {slug(head.machine)}"
    elif set(base.started_at) & set(head.started_at):
        refusal = "the same run of the tests is in both: a run is not compared with itself"
    level = alpha / max(1, tested)
    return [_judge(befores.get(key), afters.get(key), level, refusal, relevant) for key in keys]


def _judge(
    before: MeasuredRatio | None, after: MeasuredRatio | None, level: float, refusal: str | None, relevant: float
) -> RatioJudgement:
    ratio = after or before
    assert ratio is not None
    base, head = (None if side is None else math.exp(fmean(_logs(side))) for side in (before, after))
    judgement = RatioJudgement(
        test=ratio.test,
        name=ratio.name,
        better=ratio.better,
        base=base,
        head=head,
        limit=None,
        tolerance=None,
        runs=(len(before.values) if before else 0, len(after.values) if after else 0),
        verdict="missing",
    )
    if base is None or head is None or before is None or after is None:
        reason = "the run does not have it" if head is None else "the baseline does not have it: promote runs of today's tests"
        return replace(judgement, reason=reason)
    if refusal is not None:
        return replace(judgement, verdict="incomparable", reason=refusal)
    deviation = _allowed_deviation(_logs(before), _logs(after), level)
    if deviation is None:
        return replace(judgement, verdict="inconclusive", reason="one run on each side has no spread: promote a baseline")
    tolerance = max(relevant, math.expm1(deviation))
    sign = 1 if after.better == "lower" else -1
    limit = base * (1 + tolerance) ** sign
    worse = sign * math.log(head / base)
    verdict: Verdict = "neutral"
    if abs(worse) > math.log1p(tolerance):
        verdict = "regression" if worse > 0 else "improvement"
    return replace(judgement, verdict=verdict, tolerance=tolerance, limit=limit)


def _logs(ratio: MeasuredRatio) -> list[float]:
    return [math.log(value) for value in ratio.values]


def _allowed_deviation(base: Sequence[float], head: Sequence[float], level: float) -> float | None:
    """Return the difference of means that is exceeded in one direction with probability `level`; None without a spread."""
    from scipy.special import stdtrit

    freedom = len(base) + len(head) - 2
    if freedom < 1:
        return None
    squares = sum((value - fmean(side)) ** 2 for side in (base, head) for value in side)
    error = math.sqrt(squares / freedom * (1 / len(base) + 1 / len(head)))
    return float(stdtrit(freedom, 1 - level)) * error


def gate_ratios(head: Benchmarks, location: Path, machine: str | None = None) -> list[GateRow]:
    """Return a row for every ratio: whether it is within the limit that the baseline's spread gives.

    Args:
        head: a run of the tests.
        location: a baseline, or the folder that has one of this machine as `<machine>/perf.json`.
        machine: the name of that folder, if it is not the machine's own.

    Raises:
        RecordError: the run has no ratios, or the baseline that was named cannot be read.
    """
    if not head.ratios:
        raise RecordError("no test recorded a ratio in benchmark.extra_info['ratios']: there is nothing to check")
    path = location if location.suffix == ".json" else baseline_path(location, slug(machine or head.machine), BASELINE_NAME)
    if path is not location and not path.is_file():
        note = f"no baseline {path}: promote {MIN_RUNS} or more runs of the tests, benchbox baseline promote FILE..."
        return [_row(ratio.test, ratio.name, "a baseline", ratio.values[0], "inconclusive", note) for ratio in head.ratios]
    return [_gate_row(judgement) for judgement in judge_ratios(read_benchmarks(path), head)]


def _gate_row(judgement: RatioJudgement) -> GateRow:
    relation = "<=" if judgement.better == "lower" else ">="
    base = "-" if judgement.base is None else f"{judgement.base:.4g}"
    expected = f"baseline {base}"
    if judgement.limit is not None:
        expected = f"{relation} {judgement.limit:.4g} (baseline {base}, {judgement.runs[0]} runs, {judgement.tolerance:.1%})"
    verdict = _GATE_VERDICTS.get(judgement.verdict, "inconclusive")
    if judgement.base is None:
        verdict = "inconclusive"  # a new test breaks no gate
    note = judgement.reason
    if judgement.verdict == "improvement":
        note = "better than the spread of the baseline explains: promote new runs, so that the gate holds it"
    return _row(judgement.test, judgement.name, expected, judgement.head, verdict, note)


def _row(test: str, name: str, expected: str, actual: float | None, verdict: GateVerdict, note: str | None) -> GateRow:
    text = "no value" if actual is None else f"{actual:.4g}"
    return GateRow(
        cell_id=None,
        cell=short_name(test),
        metric=name,
        file=test.partition("::")[0] or None,
        expected=expected,
        actual=text,
        verdict=verdict,
        note=note,
    )


def short_name(test: str) -> str:
    """Return the name of a test without its file."""
    return test.rpartition("::")[2]


def compare_benchmarks(
    base: Benchmarks, head: Benchmarks, *, names: tuple[str, str], metrics: Collection[str] = (), relevant: float = RELEVANT
) -> RunComparison:
    """Return what changed between the ratios of two runs of tests.

    Args:
        names: of base and head, as the user names them.
        metrics: names of ratios; all of them if empty.

    Raises:
        ConfigurationError: no test has a ratio of that name.
    """
    judgements = judge_ratios(base, head, relevant=relevant, alpha=ALPHA / 2)  # changes in either direction are named
    if unknown := sorted(set(metrics) - {judgement.name for judgement in judgements}):
        raise ConfigurationError(f"no benchmark of {names[0]} or {names[1]} has a ratio {unknown[0]}")
    changes = [_change(judgement) for judgement in judgements if not metrics or judgement.name in metrics]
    return RunComparison(
        base=names[0],
        head=names[1],
        changes=tuple(changes),
        differences=(),
        relevant=relevant,
        needed=MIN_RUNS,
        method=f"Ratios are compared with the spread of {MIN_RUNS} or more runs of the tests in a baseline: a change is what "
        f"one more run exceeds, in either direction, with a probability of {ALPHA:.0%} over all ratios, and at least "
        f"{relevant:.3g} of the ratio.",
    )


def _change(judgement: RatioJudgement) -> Change:
    base, head = judgement.base, judgement.head
    return Change(
        cell_id=judgement.test,
        cell=short_name(judgement.test),
        metric=judgement.name,
        unit="ratio",
        base=base,
        head=head,
        verdict=judgement.verdict,
        ratio=None if base is None or head is None else head / base,
        launches=judgement.runs,
        reason=judgement.reason,
    )
