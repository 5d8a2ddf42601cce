"""Changes between two runs of the same cells: what became better or worse, by which launches show it.

Cells are matched by id, so only equal set-ups meet. Metrics with noise are compared launch against launch, by the exact test of
`benchbox.analysis.inference` with Holm's correction over all of them. Shares and losses have no noise and are compared by
value, and so are peaks, a small change of which more than one launch must show.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchbox.analysis.baseline_walks import resolved_point
from benchbox.analysis.certificates import LARGEST_BATCH
from benchbox.analysis.comparability import verdict_of_effect
from benchbox.analysis.figures import without_search
from benchbox.analysis.inference import (
    ALPHA,
    RELEVANT,
    Criteria,
    Verdict,
    can_settle,
    estimate_effect,
    holm,
    launches_to_settle,
)
from benchbox.analysis.noise import OF_STEP_TIMES, noise_floor
from benchbox.analysis.peak_changes import is_peak, why_unsettled
from benchbox.analysis.regression import has_noise, value_change
from benchbox.analysis.run_environments import ENVIRONMENT_KEYS, memory_limit_difference, run_differences, steps_difference
from benchbox.analysis.summary import MISSING, label, varying_fields
from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.metrics import metric_by_name
from benchbox.registry.names import did_you_mean
from benchbox.spec.cell import Cell

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from benchbox.analysis.figures import CellFigures, RunFigures, WalkFigures
    from benchbox.analysis.inference import Effect
    from benchbox.registry.metrics import Metric
    from benchbox.store.noise import Noise

    _Sides = tuple[Mapping[int, float], Mapping[int, float]]

DEFAULT_METRICS = (
    "global_samples_per_s",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "final_loss",
    "edq",
    "updates_lost",
)
STATUS = "status"
_NO_RATIO = "launches are tested by the ratios of their values, and one is not above zero"
_ONLY_SEARCHED = "launches that only searched for a batch settle nothing: a walk repeats its fastest batch"
UNSETTLED: tuple[Verdict, ...] = ("missing", "incomparable", "inconclusive")  # neither better, nor worse, nor equal
_WORST_FIRST: tuple[Verdict, ...] = ("regression", "missing", "incomparable", "inconclusive", "improvement", "neutral")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of one metric of one cell from `base` to `head`.

    `ratio` is head / base, with its interval where launches give one; None where it has no meaning, as from zero.
    """

    cell_id: str
    cell: str  # its label
    metric: str
    unit: str
    base: float | str | None
    head: float | str | None
    verdict: Verdict
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    launches: tuple[int, int] | None = None  # of base and head, where they were tested
    reason: str | None = None  # why there is no verdict, or what is behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """All changes between two runs, first of walks, then of cells in the order of `head`, then those that only `base` has."""

    base: str
    head: str
    changes: tuple[Change, ...]
    differences: tuple[str, ...]  # of the environments, which changes may come from
    relevant: float
    needed: int  # launches of each cell on each side before any difference could be settled
    method: str | None = None  # how verdicts were reached, where not by launches
    noise: Noise | None = None  # of the machine of `head`

    @property
    def counts(self) -> dict[Verdict, int]:
        """Number of changes by verdict, the worst verdict first."""
        counter = Counter(change.verdict for change in self.changes)
        return {verdict: counter[verdict] for verdict in _WORST_FIRST if counter[verdict]}

    def of_verdict(self, *verdicts: Verdict) -> list[Change]:
        return [change for change in self.changes if change.verdict in verdicts]


def compare_runs(
    base: RunFigures,
    head: RunFigures,
    *,
    metric_names: Sequence[str] = DEFAULT_METRICS,
    vary: Collection[str] = (),
    relevant: float = RELEVANT,
    noise: Noise | None = None,
) -> RunComparison:
    """Return what changed from `base` to `head`.

    Args:
        metric_names: numeric metrics; the status of cells is always compared.
        vary: keys of the environment that may differ, such as torch: what their change does is what the user asks for.
        relevant: a smaller relative change is none.
        noise: noise of the machine, if it was measured. No improvement or regression within its floor is settled.

    Raises:
        ConfigurationError: there is no such metric or key of the environment, or the metric is a word.
    """
    named = [metric_by_name(name) for name in dict.fromkeys(metric_names)]  # one named twice is tested once
    if words := [metric.name for metric in named if not metric.is_number]:
        raise ConfigurationError(f"metric {words[0]} is a word: only numbers can be named, and the status is always compared")
    if unknown := [key for key in vary if key not in ENVIRONMENT_KEYS]:
        raise ConfigurationError(
            Problem(f"--vary {unknown[0]}", "no such key of the environment", did_you_mean(unknown[0], ENVIRONMENT_KEYS))
        )
    differences = {
        **{key: f"{key} ({text})" for side in (base, head) for key, text in side.mixed.items()},
        **run_differences(head.environments, base.environments, include_machine=True),
    }
    refusal = _refusal(base, head, {key: text for key, text in differences.items() if key not in vary})
    pairs = {**head.cells, **{cell_id: cell for cell_id, cell in base.cells.items() if cell_id not in head.cells}}
    fields = varying_fields(figures.cell for figures in pairs.values())
    criteria = Criteria(relevant=relevant)
    limits = memory_limit_difference(head.measure, base.measure)
    changes = _walk_changes(base, head, fields, refusal or limits)
    tested: dict[int, tuple[Metric, _Sides]] = {}  # by index of the change
    has_figures = False  # on both sides, of any cell
    for cell_id, figures in pairs.items():
        text = label(figures.cell, fields)
        before, after = base.cells.get(cell_id), head.cells.get(cell_id)
        status = _status_change(cell_id, text, before, after, refusal or limits)
        if status is not None:
            if not _is_of_one_search(figures, status, base, head):
                changes.append(status)
            continue
        assert before is not None
        assert after is not None
        has_figures = True
        raw, of_walk = (before, after), before.of_walk or after.of_walk
        if of_walk:
            before, after = without_search(before), without_search(after)
        for metric in named:
            change, sides = _change(
                cell_id,
                text,
                metric,
                before,
                after,
                refusal,
                relevant,
                is_searched=of_walk and all(side.by_launch.get(metric.name) for side in raw),
            )
            if change is None:
                continue
            if sides is not None:
                tested[len(changes)] = (metric, sides)
            changes.append(change)
    compared = {change.metric for change in changes}
    changes += [
        Change(
            cell_id="",
            cell="all",
            metric=metric.name,
            unit=metric.unit,
            base=None,
            head=None,
            verdict="missing",
            reason="no cell has a value on either side",
        )
        for metric in named
        if has_figures
        and metric_names is not DEFAULT_METRICS
        and metric.name not in compared  # a gate must not be empty unnoticed
    ]
    effects = [estimate_effect(*sides, alpha=ALPHA, pairs=len(tested), same_run=False) for _, sides in tested.values()]
    adjusted = holm([effect.p for effect in effects])
    needed = launches_to_settle(max(1, len(tested)))
    for (index, (metric, _)), effect, p in zip(tested.items(), effects, adjusted, strict=True):
        changes[index] = _judge(changes[index], effect, p, metric, criteria, noise, len(tested))
    return RunComparison(
        base=base.name,
        head=head.name,
        changes=tuple(changes),
        differences=tuple(differences.values()),
        relevant=relevant,
        needed=needed,
        noise=noise,
    )


def _refusal(base: RunFigures, head: RunFigures, differences: Mapping[str, str]) -> str | None:
    """Return why no figure of the two runs may be compared, or None."""
    if shared := base.started_at & head.started_at:
        return f"{len(shared)} launches are in both: a run is not compared with itself"
    if differences:
        return f"they also differ in {'; '.join(differences.values())} (--vary {','.join(differences)} compares nevertheless)"
    return steps_difference(base.measure, head.measure)


def _walk_changes(base: RunFigures, head: RunFigures, fields: Sequence[str], refusal: str | None) -> list[Change]:
    """Return the changes of the largest batches of the walks that both sides have."""
    others = [field for field in fields if field != "batch"]
    changes = []
    for point, after in head.walks.items():
        before = base.walks.get(point)
        if before is None or False in (before.is_walk, after.is_walk) or not (before.is_walk or after.is_walk):
            continue
        old, new = before.largest or 0, after.largest or 0
        change = Change(
            cell_id=Cell.from_dict(dict(after.cell)).cell_id,
            cell=label(after.cell, others),
            metric=LARGEST_BATCH,
            unit="batch",
            base=before.largest,
            head=after.largest,
            verdict="neutral" if old == new else "regression" if new < old else "improvement",
            ratio=new / old if old else None,
        )
        if refusal is not None:
            change = replace(change, verdict="incomparable", reason=refusal)
        elif reason := before.reason or after.reason or _why_capped(before, after):
            change = replace(change, verdict="inconclusive", reason=reason)
        changes.append(change)
    return changes


def _why_capped(before: WalkFigures, after: WalkFigures) -> str | None:
    """Return why the smaller of two largest batches need not be the largest that fits; None where launches show that it is."""
    old, new = before.largest or 0, after.largest or 0
    smaller = before if old < new else after
    if old == new or smaller.at_most is None or min(old, new) < smaller.at_most:
        return None
    return f"at_most {smaller.at_most} fits in {'base' if smaller is before else 'head'}, and no larger batch was tried"


def _status_change(
    cell_id: str, text: str, before: CellFigures | None, after: CellFigures | None, refusal: str | None
) -> Change | None:
    """Return the change of a cell that did not end ok on both sides; None for a cell with figures to compare.

    Args:
        refusal: why memory may not be compared: as with other devices or another limit.
    """
    statuses = [figures.status if figures is not None else MISSING for figures in (before, after)]
    if statuses == ["ok", "ok"]:
        return None
    base, head = statuses
    verdict: Verdict = "neutral" if base == head else "regression" if base == "ok" else "improvement"
    reason = after.reason if after is not None and verdict != "neutral" and head != "ok" else None
    if MISSING in statuses:
        verdict = "missing"
        absent = "base" if base == MISSING else "head"
        reason = f"{absent} does not have it"
    elif {base, head} == {"ok", "oom"} and refusal is not None:
        verdict, reason = "incomparable", refusal
    elif "ok" not in statuses and base != head:
        verdict = "inconclusive"
    return Change(cell_id=cell_id, cell=text, metric=STATUS, unit="text", base=base, head=head, verdict=verdict, reason=reason)


def _is_of_one_search(figures: CellFigures, status: Change, base: RunFigures, head: RunFigures) -> bool:
    """Return whether the search of one side tried a batch once, and that of the other side had no need to.

    The largest batches of their walks are what is compared. A batch that was repeated or crashed is missing on the other side.
    """
    statuses = {status.base, status.head}
    if not figures.of_walk or MISSING not in statuses or not statuses <= {"ok", "oom", MISSING}:
        return False
    point = resolved_point(figures.cell)
    is_searched = all(set(launches) <= {1} for launches in figures.by_launch.values())
    return is_searched and point in base.walks and point in head.walks


def _change(
    cell_id: str,
    text: str,
    metric: Metric,
    before: CellFigures,
    after: CellFigures,
    refusal: str | None,
    relevant: float,
    *,
    is_searched: bool,
) -> tuple[Change | None, _Sides | None]:
    """Return the change of a metric and, where launches are to be tested, those whose ratio is above 1 for the better."""
    old, new = (figures.values.get(metric.name) for figures in (before, after))
    if old is None and new is None:
        return None, None
    values: dict[str, Any] = {
        "base": None if old is None else old.value,
        "head": None if new is None else new.value,
    }
    change = Change(cell_id=cell_id, cell=text, metric=metric.name, unit=metric.unit, verdict="missing", **values)
    if old is None or new is None:
        return replace(change, reason=f"{'base' if old is None else 'head'} has no value"), None
    if refusal is not None:
        return replace(change, verdict="incomparable", reason=refusal), None
    launches = [figures.by_launch.get(metric.name) or {} for figures in (before, after)]
    if has_noise(metric) and is_searched and not all(launches):
        return replace(change, verdict="inconclusive", reason=_ONLY_SEARCHED), None
    if has_noise(metric) and not all(launches):
        return replace(change, reason="a baseline of an earlier version has no values of launches"), None
    if not has_noise(metric):
        return _judge_values(change, metric, old.value, new.value, relevant, *(side.values() for side in launches)), None
    values_of_launches = [value for side in launches for value in side.values()]
    if not any(values_of_launches):
        return replace(change, verdict="neutral"), None
    if min(values_of_launches) <= 0:
        return replace(change, verdict="inconclusive", reason=_NO_RATIO), None
    return change, (launches[1], launches[0]) if metric.direction == "higher" else (launches[0], launches[1])


def _judge_values(
    change: Change,
    metric: Metric,
    old: float,
    new: float,
    relevant: float,
    before: Collection[float],
    after: Collection[float],
) -> Change:
    """Return the change with the verdict that the values of both sides show, and the launches that they are the worst of."""
    ratio = new / old if old else None
    if value_change(metric, old, new) <= relevant:
        return replace(change, ratio=ratio, verdict="neutral")
    if metric.direction == "none":
        return replace(change, ratio=ratio, verdict="regression", reason="it should not change")
    if is_peak(metric) and (reason := why_unsettled(before, after, relevant)):
        return replace(change, ratio=ratio, verdict="inconclusive", reason=reason)
    improved = (new > old) == (metric.direction == "higher")
    return replace(change, ratio=ratio, verdict="improvement" if improved else "regression")


def _judge(
    change: Change,
    effect: Effect,
    adjusted_p: float | None,
    metric: Metric,
    criteria: Criteria,
    noise: Noise | None,
    pairs: int,
) -> Change:
    """Return the change with the verdict that its launches show, as head / base. `pairs` is the number of tested figures."""
    verdict, reason = verdict_of_effect(effect, adjusted_p, criteria), None
    ratio, low, high, launches = effect.ratio, effect.low, effect.high, effect.launches
    if metric.direction == "lower":
        ratio = 1 / ratio
        low, high = (None if bound is None else 1 / bound for bound in (high, low))
    else:
        launches = launches[::-1]
    if verdict == "inconclusive" and not can_settle(launches, pairs):
        reason = f"{launches[0]} and {launches[1]} launches cannot settle it: {launches_to_settle(pairs)} on each side can"
    elif verdict in ("improvement", "regression") and noise is not None and metric.name in OF_STEP_TIMES:
        floor = noise_floor(noise, min(launches))
        if max(effect.ratio, 1 / effect.ratio) < 1 + floor:
            verdict, reason = "inconclusive", f"it is within the noise floor of this machine, {floor:.1%}"
    return replace(change, ratio=ratio, low=low, high=high, launches=launches, verdict=verdict, reason=reason)
