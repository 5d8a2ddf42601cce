"""Trends of metrics over runs of the same matrix on the same machine, and the changes in them.

A change point is found in two stages. Binary segmentation (Scott and Knott, Biometrics 30, 1974; Vostrikova, Soviet Mathematics
Doklady 24, 1981) proposes one: it splits the runs of a cell in two where the means of the logarithms differ most, and then each
part in the same way. The exact test of `benchbox.analysis.inference` confirms it: up to `NEAREST` launches on either side,
those of the runs nearest to it, are exchanged; p is multiplied by the number of positions that the split was chosen from
(Bonferroni), and corrected by Holm's procedure over all proposals of a matrix. Only a change beyond what is relevant is one,
and beyond the noise floor of the machine where it was measured. A metric without noise changes where its value does, and a peak
where that is more than chance does (`benchbox.analysis.peak_changes`).

Launches of one run share its conditions, and the machine may drift between runs. What differs between two runs of one commit in
one environment is such a drift: it is marked as one, and in its trend no change between commits that is not larger is marked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchbox.analysis.inference import ALPHA, RELEVANT, estimate_effect, holm
from benchbox.analysis.noise import OF_STEP_TIMES, noise_floor
from benchbox.analysis.peak_changes import is_peak, why_unsettled
from benchbox.analysis.regression import has_noise, value_change
from benchbox.analysis.run_environments import environment_differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.registry.metrics import Metric
    from benchbox.store.noise import Noise

NEAREST = 10  # launches on either side of a change: ten against ten are enumerated


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendPoint:
    """Value of a metric of one cell in one run."""

    run: str  # as the user names it
    commit: str | None  # of benchbox or of the training code, in which the launches ran
    dirty: bool
    started_at: str
    value: float
    low: float
    high: float
    launches: tuple[float, ...]  # values; empty for baselines of earlier versions
    environment: Mapping[str, Any]
    steps: int | None  # measured in a launch


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """A change between two neighbouring runs of a trend. `index` is that of the first run after it.

    `ratio` is after / before over the launches that were tested, with its interval where launches give one; None after zero.
    """

    index: int
    before: TrendPoint
    after: TrendPoint
    ratio: float | None
    low: float | None
    high: float | None
    p: float | None  # after both corrections; None for a metric without noise
    is_worse: bool
    differences: tuple[str, ...]  # of the environments, which the change may come from

    @property
    def is_drift(self) -> bool:
        """Return whether nothing has changed but the time: the commit is the same, without uncommitted changes."""
        is_same = self.before.commit is not None and self.before.commit == self.after.commit
        return is_same and not (self.before.dirty or self.after.dirty or self.differences)

    @property
    def size(self) -> float:
        """Relative size in either direction: 0.25 for 1.25 as for 0.8; infinite after zero."""
        return max(self.ratio, 1 / self.ratio) - 1 if self.ratio else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Runs of one cell in the order of their commits."""

    cell_id: str
    cell: str  # its label
    metric: Metric
    points: tuple[TrendPoint, ...]
    changes: tuple[ChangePoint, ...] = ()


@dataclass(frozen=True, slots=True)
class _Proposal:
    start: int  # of the runs that were split
    split: int
    end: int
    p: float | None
    ratio: float
    low: float | None
    high: float | None

    @property
    def is_consistent(self) -> bool:
        """Return whether the estimate, a median, is on the side of 1 that the test, which is of means, shows."""
        if self.low is None or self.high is None:
            return False
        return self.low > 1 if self.ratio > 1 else self.high < 1


def mark_changes(trends: Sequence[Trend], *, relevant: float = RELEVANT, noise: Noise | None = None) -> list[Trend]:
    """Return trends of one matrix with their changes.

    On a machine that does not drift between runs, one of a hundred such matrices has a wrong one by chance.
    """
    proposals = {
        index: _propose(trend.points, 0, len(trend.points))
        for index, trend in enumerate(trends)
        if has_noise(trend.metric) and all(min(point.launches or (point.low,)) > 0 for point in trend.points)
    }
    tested = [
        (index, number)
        for index, entries in proposals.items()
        for number, proposal in enumerate(entries)
        if proposal.p is not None  # with too few launches nothing was tested
    ]
    adjusted = dict(zip(tested, holm([proposals[index][number].p for index, number in tested]), strict=True))
    marked = []
    for index, trend in enumerate(trends):
        if index not in proposals:
            marked.append(replace(trend, changes=tuple(_value_changes(trend, relevant))))
            continue
        confirmed = []
        for number, proposal in enumerate(proposals[index]):
            p = adjusted.get((index, number))
            size = max(proposal.ratio, 1 / proposal.ratio) - 1
            sides = ((proposal.start, proposal.split), (proposal.split, proposal.end))
            launches = min(_count(trend.points[first:last]) for first, last in sides)
            floor = 0.0
            if noise is not None and trend.metric.name in OF_STEP_TIMES:
                floor = noise_floor(noise, max(1, min(NEAREST, launches)))
            if p is not None and p <= ALPHA and size > max(relevant, floor) and proposal.is_consistent:
                confirmed.append(_change_of(trend, proposal, p))
        drift = max((change.size for change in confirmed if change.is_drift), default=0.0)
        believed = [change for change in confirmed if change.is_drift or change.size > drift]
        marked.append(replace(trend, changes=tuple(sorted(believed, key=lambda change: change.index))))
    return marked


def _propose(points: Sequence[TrendPoint], start: int, end: int) -> list[_Proposal]:
    """Return the best split of runs `start` to `end` and those of its parts, until launches do not show it."""
    positions = end - start - 1  # among which the split is chosen
    if positions < 1:
        return []
    split = start + _best_split(points[start:end])
    before, after = _nearest(points[start:split][::-1]), _nearest(points[split:end])
    if not before or not after:  # older baselines have no launches: nothing is tested here, but the parts are
        return [*_propose(points, start, split), *_propose(points, split, end)]
    effect = estimate_effect(dict(enumerate(after, 1)), dict(enumerate(before, 1)), same_run=False)
    p = None if effect.p is None else min(1.0, effect.p * positions)
    proposal = _Proposal(start, split, end, p, effect.ratio, effect.low, effect.high)
    if p is None or p > ALPHA:
        # It is not confirmed whatever the other cells show, but it counts among what was tested.
        return [proposal]
    return [*_propose(points, start, split), proposal, *_propose(points, split, end)]


def _best_split(points: Sequence[TrendPoint]) -> int:
    """Return the number of runs before the split that leaves the least squares around the means of both sides."""
    logs = np.log([point.value for point in points])
    weights = np.array([max(1, len(point.launches)) for point in points], dtype=float)
    counts = np.cumsum(weights)[:-1]
    sums = np.cumsum(weights * logs)[:-1]
    total, count = float(weights @ logs), float(weights.sum())
    between = sums**2 / counts + (total - sums) ** 2 / (count - counts)
    return int(np.argmax(between)) + 1


def _nearest(points: Sequence[TrendPoint]) -> list[float]:
    """Return the launches of the first runs, at most `NEAREST`, and of a run that has more the first of them."""
    return [value for point in points for value in point.launches][:NEAREST]


def _count(points: Sequence[TrendPoint]) -> int:
    return sum(len(point.launches) for point in points)


def _value_changes(trend: Trend, relevant: float) -> list[ChangePoint]:
    """Return where a value without noise changes from one run to the one after it, and a peak in more than one launch."""
    changes = []
    reference = 0  # a slow drift adds up: compared with the run after the last change
    for index in range(1, len(trend.points)):
        before, after = trend.points[reference], trend.points[index]
        if value_change(trend.metric, before.value, after.value) <= relevant:
            continue
        if is_peak(trend.metric):  # the runs since the last change, and this one with the next, have more launches together
            earlier, later = (
                [value for point in trend.points[first:stop] for value in point.launches]
                for first, stop in ((reference, index), (index, index + 2))
            )
            if why_unsettled(earlier, later, relevant):
                continue
        changes.append(_value_change(trend, reference, index))
        reference = index
    return changes


def _value_change(trend: Trend, reference: int, index: int) -> ChangePoint:
    before, after = trend.points[reference], trend.points[index]
    ratio = after.value / before.value if before.value else None
    return ChangePoint(
        index=index,
        before=before,
        after=after,
        ratio=ratio,
        low=None,
        high=None,
        p=None,
        is_worse=_is_worse(trend, rises=after.value > before.value),
        differences=_differences(before, after),
    )


def _change_of(trend: Trend, proposal: _Proposal, p: float) -> ChangePoint:
    before, after = trend.points[proposal.split - 1], trend.points[proposal.split]
    return ChangePoint(
        index=proposal.split,
        before=before,
        after=after,
        ratio=proposal.ratio,
        low=proposal.low,
        high=proposal.high,
        p=p,
        is_worse=_is_worse(trend, rises=proposal.ratio > 1),
        differences=_differences(before, after),
    )


def _is_worse(trend: Trend, *, rises: bool) -> bool:
    return trend.metric.direction == "none" or rises == (trend.metric.direction == "lower")


def _differences(before: TrendPoint, after: TrendPoint) -> tuple[str, ...]:
    differences = list(environment_differences(after.environment, before.environment).values())
    if before.steps != after.steps:
        differences.append(f"{after.steps} measured steps against {before.steps}")
    return tuple(differences)


def order_points(points: Sequence[TrendPoint], commits: Mapping[str, int]) -> list[TrendPoint]:
    """Return points in the order of their commits, equal ones by time; by time alone if a commit is not in the repository."""
    by_commit = all(point.commit in commits for point in points)
    return sorted(points, key=lambda point: (commits[point.commit or ""] if by_commit else 0, point.started_at))
