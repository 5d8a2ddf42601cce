"""Ratio of two cells over their launches: an exact permutation interval, and the number of launches that could settle it.

The sample is the launch. Launches of two cells that do not differ are exchangeable, so the distribution of the difference of
their means is known exactly: it is that over all ways to exchange them (Fisher 1935; Ernst, Statistical Science 19, 2004,
section 2). The interval has those ratios that this test does not reject. Nothing is assumed about the shape of the noise, and a
launch that was disturbed widens the interval instead of moving a verdict. That the noise is the same on both sides is assumed,
and often wrong: two backends, or a busy host, scatter differently. The interval is therefore at least as wide as that of a test
for unequal scatter (Welch 1947), and no difference within it is settled. With launches exchanged within rounds it need not be:
what is exchanged there is a difference, which is as probable with either sign if the cells do not differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALPHA = 0.01  # of wrong verdicts that are accepted over all pairs of a table
RELEVANT = 0.02  # a smaller difference of two cells is none
MAX_EXCHANGES = 200_000  # more are sampled: 10 against 10 launches are still enumerated
MIN_SAMPLED = 20_000
ROUNDING = 1e-12  # a difference by rounding alone is none, whatever the number of launches


Verdict = Literal["improvement", "neutral", "regression", "inconclusive", "incomparable", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """Conditions of a verdict: how probable a wrong one may be over all pairs, and what difference is relevant.

    With `complete`, a pair is judged only by all planned launches of both cells. `settled` has the verdicts of pairs that an
    earlier test at the same `alpha` has settled, by `Comparison.pair_id`.
    """

    alpha: float = ALPHA
    relevant: float = RELEVANT
    complete: bool = False
    settled: Mapping[str, Verdict] = field(default_factory=dict)


ONE_TEST = Criteria()

_LARGEST = 300.0  # width of an interval of logarithms, of whose ends ratios are numbers

_Interval = tuple[float, float] | tuple[None, None]

Method = Literal["exchanged launches", "exchanged rounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Ratio of a metric of two cells, with its interval of confidence 1 - `ALPHA`.

    `ratio` is the estimate of Hodges and Lehmann (Annals of Mathematical Statistics 34, 1963): the median of the ratios of all
    pairs of launches, or of the means of all pairs of rounds, which a disturbed launch hardly moves.

    `low` and `high` are None when there are too few launches for any interval, and so is `p`, that of the hypothesis that the
    cells do not differ, on both sides. `joint_low` and `joint_high` are the interval that holds for all pairs of a table at
    once (Bonferroni). `launches` are those of the subject and of the reference.
    """

    ratio: float
    low: float | None
    high: float | None
    joint_low: float | None
    joint_high: float | None
    p: float | None
    launches: tuple[int, int]
    method: Method


def estimate_effect(
    subject: Mapping[int, float], reference: Mapping[int, float], *, alpha: float = ALPHA, pairs: int = 1, same_run: bool = True
) -> Effect:
    """Return the ratio of subject to reference.

    Values of the same number are of one round of a run. With enough common rounds, ten for a single pair, launches are
    exchanged within rounds, which removes what changed from round to round; with fewer they are exchanged over all rounds,
    which settles sooner.

    Args:
        subject: positive values of a metric by number of the round or launch; at least one.
        reference: the same of the other cell.
        pairs: of the table, each of which must be able to reach `alpha / pairs`.
        same_run: whether values of the same number are of one round.
    """
    rounds = sorted(subject.keys() & reference.keys()) if same_run else []
    sampled = min(MAX_EXCHANGES, max(MIN_SAMPLED, math.ceil(4 * pairs / alpha)))
    method: Method
    if 8 / 2 ** len(rounds) <= alpha / pairs:
        differences = np.array([math.log(subject[number] / reference[number]) for number in rounds])
        shifts, method = _shifts_of_rounds(differences), "exchanged rounds"
        means = (differences[:, None] + differences[None, :]) / 2
        estimate = _median(means[np.triu_indices(len(rounds))])
        counts = (len(rounds), len(rounds))
        extremes, possible = (differences.min(), -differences.max()), 2 ** len(rounds)
    else:
        ours, theirs = (np.log(list(values.values())) for values in (subject, reference))
        shifts, method = _shifts_of_launches(ours, theirs, sampled), "exchanged launches"
        estimate = _median((ours[:, None] - theirs[None, :]).ravel())
        counts = (len(ours), len(theirs))
        extremes, possible = (ours.min() - theirs.max(), theirs.min() - ours.max()), math.comb(sum(counts), counts[0])
    exchanges = len(shifts) + 1  # those that exchange nothing included
    joint_alpha = alpha / max(1, pairs)
    interval, joint = _interval(shifts, alpha), _interval(shifts, joint_alpha)
    p = None
    if interval[0] is not None:
        if max(extremes) > ROUNDING:  # every exchange makes the difference smaller, sampled or not
            p = 2 / possible
        else:
            not_above = 1 + int(np.count_nonzero(shifts <= ROUNDING))
            not_below = 1 + int(np.count_nonzero(shifts >= -ROUNDING))
            p = min(1.0, 2 * min(not_above, not_below) / exchanges)
    if method == "exchanged launches" and p is not None and (scatter := _UnequalScatter.of(ours, theirs)):
        p = max(p, scatter.p)
        interval, joint = scatter.widened(interval, alpha), scatter.widened(joint, joint_alpha)
    return Effect(
        ratio=math.exp(estimate),
        low=interval[0],
        high=interval[1],
        joint_low=joint[0],
        joint_high=joint[1],
        p=p,
        launches=counts,
        method=method,
    )


def _interval(shifts: np.ndarray, alpha: float) -> _Interval:
    """Return the ratios that a test at `alpha` on both sides does not reject, least and most; None for too few exchanges."""
    rank = math.floor(alpha / 2 * (len(shifts) + 1))
    if rank < 1:
        return None, None
    ends = (rank - 1, len(shifts) - rank)
    ordered = np.partition(shifts, ends)  # two of up to 200,000 are needed in their order
    return math.exp(ordered[ends[0]]), math.exp(ordered[ends[1]])


@dataclass(frozen=True, slots=True)
class _UnequalScatter:
    """Test and interval of Welch (Biometrika 34, 1947), for launches that may scatter differently on both sides.

    Exchanges alone then show a difference too often: of 2% to 4% of equal cells with 9 to 5 launches of which one side scatters
    ten times as much as the other, and of up to 17% where five launches do and twenty others do not.
    """

    difference: float  # of means of logarithms
    error: float  # its standard error
    freedom: float

    @classmethod
    def of(cls, ours: np.ndarray, theirs: np.ndarray) -> Self | None:
        """Return that of logarithms; None where a side has one, or all are equal on both."""
        if min(len(ours), len(theirs)) < 2:
            return None
        variances = [float(values.var(ddof=1)) / len(values) for values in (ours, theirs)]
        if not (total := sum(variances)):
            return None
        freedom = total**2 / sum(part**2 / (len(side) - 1) for part, side in zip(variances, (ours, theirs), strict=True))
        return cls(float(ours.mean() - theirs.mean()), math.sqrt(total), freedom)

    @property
    def p(self) -> float:
        """The p value of no difference, on both sides."""
        from scipy.special import stdtr

        return float(2 * stdtr(self.freedom, -abs(self.difference) / self.error))

    def widened(self, interval: _Interval, alpha: float) -> _Interval:
        """Return an interval of ratios with those that this test does not reject."""
        from scipy.special import stdtrit

        low, high = interval
        if low is None or high is None:
            return interval
        width = float(stdtrit(self.freedom, 1 - alpha / 2)) * self.error
        width = min(width, _LARGEST)  # that of two launches against hundreds of others may be larger
        return min(low, math.exp(self.difference - width)), max(high, math.exp(self.difference + width))


def _median(values: np.ndarray) -> float:
    """Return the median as `np.median` does, which takes ten times as long for the few values of most pairs."""
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _shifts_of_rounds(differences: np.ndarray) -> np.ndarray:
    """Return the shifts at which exchanging the cells in a set of rounds changes nothing: means of all sets."""
    n = len(differences)
    if 2**n <= MAX_EXCHANGES:
        return _means_of_sets((np.arange(1, 2**n)[:, None] >> np.arange(n)) & 1, differences)
    rng, size = np.random.default_rng(0), MAX_EXCHANGES // 1000  # few at once: all sets of 1,000 rounds would take 1.6 GB
    return np.concatenate([_means_of_sets(_random_sets(rng, size, n), differences) for _ in range(1000)])


def _random_sets(rng: np.random.Generator, size: int, n: int) -> np.ndarray:
    """Return sets of n rounds, every round in half of them: eight from a random byte, as numbers take five times as long."""
    octets = np.frombuffer(rng.bytes(size * math.ceil(n / 8)), dtype=np.uint8).reshape(size, -1)
    return np.unpackbits(octets, axis=1, count=n)


def _means_of_sets(sets: np.ndarray, differences: np.ndarray) -> np.ndarray:
    """Return the mean of the differences in each set that is not empty."""
    sets = sets[sets.any(axis=1)].astype(np.float64)  # products of integers and floats take three times as long
    means: np.ndarray = sets @ differences / sets.sum(axis=1)
    return means


def _shifts_of_launches(ours: np.ndarray, theirs: np.ndarray, sampled: int) -> np.ndarray:
    """Return the shifts at which exchanging k launches of ours for k of theirs changes nothing; `sampled` ones if all are many.

    With the sums of the exchanged launches a shift is (sum of ours - sum of theirs) / k.
    """
    n, m = len(ours), len(theirs)
    if math.comb(n + m, n) > MAX_EXCHANGES:
        return _sampled_shifts(ours, theirs, sampled)
    shifts = []
    for k in range(1, min(n, m) + 1):
        removed, added = (_sums(values, k) for values in (ours, theirs))
        shifts.append(((removed[:, None] - added[None, :]) / k).ravel())
    return np.concatenate(shifts)


def _sums(values: np.ndarray, k: int) -> np.ndarray:
    """Return the sum of every set of k values."""
    sums: np.ndarray = values[_sets(len(values), k)].sum(axis=1)
    return sums


@lru_cache(maxsize=32)
def _sets(n: int, k: int) -> np.ndarray:
    """Return all sets of k of n numbers, one in a row: a few megabytes at most (`MAX_EXCHANGES`)."""
    return np.array(list(combinations(range(n), k)))


def _sampled_shifts(ours: np.ndarray, theirs: np.ndarray, sampled: int) -> np.ndarray:
    rng, pooled, n = np.random.default_rng(0), np.concatenate([ours, theirs]), len(ours)
    pooled -= pooled.mean()
    shifts = []
    rows = max(1, 1_000_000 // len(pooled))  # at once
    for start in range(0, sampled, rows):
        keys = rng.random((min(rows, sampled - start), len(pooled)))
        chosen = np.argpartition(keys, n - 1, axis=1)[:, :n]  # the launches that take the place of ours
        exchanged = np.count_nonzero(chosen >= n, axis=1)
        differences = pooled[:n].sum() - pooled[chosen].sum(axis=1)
        shifts.append(differences[exchanged > 0] / exchanged[exchanged > 0])
    return np.concatenate(shifts)


def launches_to_settle(pairs: int = 1, *, alpha: float = ALPHA) -> int:
    """Return how many launches each cell needs before any difference could settle all pairs of a table.

    The smallest p of n against n launches is 2 / C(2n, n), and Holm's procedure asks the best of k pairs for alpha / k.
    """
    n = 1
    while not can_settle((n, n), pairs, alpha=alpha):
        n += 1
    return n


def can_settle(launches: tuple[int, int], pairs: int = 1, *, alpha: float = ALPHA) -> bool:
    """Return whether so many launches of two cells could settle any difference of all pairs of a table."""
    return 2 / math.comb(sum(launches), launches[0]) <= alpha / pairs


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p values adjusted for their number (Holm, Scandinavian Journal of Statistics 6, 1979). None stays None."""
    ascending = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for position, (p, index) in enumerate(ascending):
        largest = max(largest, min(1.0, p * (len(p_values) - position)))
        adjusted[index] = largest
    return adjusted
