"""Verdicts on two cells: how often chance alone brings one about, and how often a real difference is found."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from benchbox.analysis.comparability import verdict_of_effect
from benchbox.analysis.inference import ALPHA, ONE_TEST, RELEVANT, Effect, can_settle, estimate_effect, holm, launches_to_settle


def effect_of(subject, reference) -> Effect:
    return estimate_effect(dict(enumerate(subject, 1)), dict(enumerate(reference, 1)))


def share_of_verdicts(
    launches: int, *, noise: float, slowdown: float = 0.0, repetitions: int, disturbed: bool = False
) -> float:
    """Return the share of simulated comparisons that call the subject different from the reference."""
    rng = np.random.default_rng(launches)
    verdicts = 0
    for _ in range(repetitions):
        subject, reference = np.exp(rng.normal(0, noise, (2, launches)))
        subject /= 1 + slowdown
        if disturbed:
            for values in (subject, reference):
                values[rng.integers(launches)] /= rng.uniform(1.2, 3)
        effect = effect_of(subject, reference)
        assert effect.p is not None
        verdicts += effect.p <= ALPHA and abs(math.log(effect.ratio)) >= math.log(1 + RELEVANT)
    return verdicts / repetitions


@pytest.mark.parametrize("launches", [5, 6, 10])
@pytest.mark.parametrize("noise", [0.002, 0.01, 0.05, 0.2])
def test_equal_cells_differ_in_at_most_one_of_a_hundred_comparisons(launches, noise):
    """Whatever the noise of launches. With 2000 repetitions of a rate of 1%, chance gives up to 1.7%."""
    assert share_of_verdicts(launches, noise=noise, repetitions=2000 if launches < 10 else 300) <= 0.017


def test_a_slowdown_of_five_percent_is_found_with_five_launches_on_a_quiet_host():
    assert share_of_verdicts(5, noise=0.01, slowdown=0.05, repetitions=500) >= 0.9


def test_a_disturbed_launch_of_each_cell_makes_no_verdict():
    assert share_of_verdicts(5, noise=0.01, repetitions=500, disturbed=True) <= 0.01


@pytest.mark.parametrize("launches", [5, 10])
def test_the_interval_has_the_true_ratio_as_often_as_it_says(launches):
    rng, repetitions = np.random.default_rng(0), 1000 if launches < 10 else 300
    covered = 0
    for _ in range(repetitions):
        subject, reference = np.exp(rng.normal(0, 0.03, (2, launches)))
        effect = effect_of(subject * 1.3, reference)
        covered += effect.low <= 1.3 <= effect.high
    assert covered / repetitions >= 1 - ALPHA - 0.01


def test_equality_of_many_pairs_is_shown_by_an_interval_that_holds_for_all_of_them():
    """It is that of a test at a share of the probability, and wider than that of each pair."""
    rng = np.random.default_rng(4)
    values = [np.exp(rng.normal(0, 0.005, (2, 8))) for _ in range(20)]
    effects = [estimate_effect(*(dict(enumerate(side, 1)) for side in sides), pairs=17) for sides in values]
    for effect in effects:
        assert effect.joint_low < effect.low < effect.high < effect.joint_high
    (subject, reference), alone = values[0], effect_of(*values[0])
    assert (alone.joint_low, alone.joint_high) == (alone.low, alone.high)
    at_level = estimate_effect(dict(enumerate(subject, 1)), dict(enumerate(reference, 1)), alpha=ALPHA / 17)
    assert (effects[0].joint_low, effects[0].joint_high) == (at_level.low, at_level.high)


def test_the_median_of_launches_of_two_kinds_is_no_verdict_against_their_mean():
    """Most launches are 3% faster, and seven of sixteen take far longer: the mean is lower, which the test shows."""
    subject = [1.03 + 0.0001 * number for number in range(9)] + [0.6 + 0.0001 * number for number in range(7)]
    reference = [1 + 0.0001 * number for number in range(16)]
    effect = estimate_effect(dict(enumerate(subject)), dict(enumerate(reference)), same_run=False)
    assert effect.ratio > 1.02
    assert effect.high < 1
    assert verdict_of_effect(effect, effect.p, ONE_TEST) == "inconclusive"
    other = estimate_effect(dict(enumerate(reference)), dict(enumerate(subject)), same_run=False)
    assert verdict_of_effect(other, other.p, ONE_TEST) == "inconclusive"


def test_the_estimate_of_an_even_number_of_ratios_lies_between_the_middle_two():
    assert estimate_effect({1: 1.0, 2: 4.0}, {1: 1.0}, same_run=False).ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("launches", "pairs", "can"), [((5, 5), 1, True), ((5, 5), 2, False), ((4, 12), 1, True), ((4, 4), 1, False)]
)
def test_whether_launches_can_settle_a_pair_depends_on_both_numbers(launches, pairs, can):
    assert can_settle(launches, pairs) is can


def test_drift_of_the_machine_over_rounds_is_removed_with_ten_rounds():
    """The machine becomes a third slower; the cells differ by 4%, which is found once launches are paired by round."""
    rng = np.random.default_rng(3)
    drift = np.linspace(1, 0.67, 10)
    subject, reference = drift * np.exp(rng.normal(0, 0.005, (2, 10)))
    effect = effect_of(subject * 1.04, reference)
    assert (effect.method, effect.launches) == ("exchanged rounds", (10, 10))
    assert effect.p <= ALPHA
    assert 1.02 < effect.low < effect.ratio < effect.high < 1.06


def test_the_p_value_is_that_of_all_exchanges_counted_one_by_one():
    subject, reference = [1.0, 1.2, 0.9, 1.1, 1.3], [1.4, 1.35, 1.0, 1.5, 1.25]
    logs = np.log(subject + reference)
    difference = logs[:5].mean() - logs[5:].mean()
    exchanged = [logs[list(chosen)].mean() - np.delete(logs, list(chosen)).mean() for chosen in combinations(range(10), 5)]
    expected = 2 * sum(value <= difference + 1e-12 for value in exchanged) / len(exchanged)
    assert effect_of(subject, reference).p == pytest.approx(expected)


def test_unequal_numbers_of_launches_are_compared():
    effect = effect_of([1.1, 1.12, 1.11, 1.13], [1.0, 1.01, 1.02, 0.99, 1.0, 1.01])
    assert effect.launches == (4, 6)
    assert effect.p == pytest.approx(2 / math.comb(10, 4))
    assert effect.low > 1


@pytest.mark.parametrize(("few", "many", "noise"), [(5, 20, 0.005), (5, 20, 0.025), (4, 12, 0.005), (5, 10, 0.005)])
def test_equal_runs_of_which_the_one_with_fewer_launches_scatters_more_rarely_differ(few, many, noise):
    """Exchanged launches alone call 5 to 17% of such runs different. With 300 repetitions of 1%, chance gives up to 3%."""
    rng, different = np.random.default_rng(few + many), 0
    for _ in range(300):
        subject, reference = np.exp(rng.normal(0, 0.05, few)), np.exp(rng.normal(0, noise, many))
        effect = estimate_effect(dict(enumerate(subject)), dict(enumerate(reference)), same_run=False)
        different += effect.p <= ALPHA
        assert (effect.p <= ALPHA) == (effect.low > 1 or effect.high < 1)
    assert different / 300 <= 0.03


def test_equal_cells_of_a_run_of_which_one_scatters_more_rarely_differ():
    """Exchanged launches alone call 4% of such pairs different. With 600 repetitions of 1%, chance gives up to 13."""
    rng, different = np.random.default_rng(5), 0
    for _ in range(600):
        effect = effect_of(np.exp(rng.normal(0, 0.1, 5)), np.exp(rng.normal(0, 0.01, 5)))
        different += effect.p <= ALPHA
        assert (effect.p <= ALPHA) == (effect.low > 1 or effect.high < 1)
    assert different <= 13


def test_two_launches_that_scatter_widely_are_compared_with_hundreds_among_many_pairs():
    """With one degree of freedom, the interval of all pairs at once is wider than floating-point numbers are."""
    many = {launch: 1 + 0.001 * launch for launch in range(200)}
    effect = estimate_effect({1: 1.0, 2: 1.4}, many, pairs=90, same_run=False)
    assert 0 < effect.joint_low < effect.low < 1 < effect.high < effect.joint_high < math.inf


def test_many_launches_are_sampled_and_agree_with_the_enumeration(monkeypatch):
    rng = np.random.default_rng(5)
    subject, reference = rng.normal(1, 0.02, (2, 8))
    exact = effect_of(subject, reference)
    monkeypatch.setattr("benchbox.analysis.inference.MAX_EXCHANGES", 12_000)  # of 12,870
    sampled = effect_of(subject, reference)
    assert sampled.p == pytest.approx(exact.p, abs=0.05)
    assert (sampled.low, sampled.high) == (pytest.approx(exact.low, rel=0.01), pytest.approx(exact.high, rel=0.01))


def test_many_rounds_are_sampled_and_agree_with_the_enumeration(monkeypatch):
    rng = np.random.default_rng(6)
    subject, reference = rng.normal(1.01, 0.02, (2, 13))
    exact = effect_of(subject, reference)
    assert exact.method == "exchanged rounds"
    monkeypatch.setattr("benchbox.analysis.inference.MAX_EXCHANGES", 8_000)  # of 8,192
    sampled = effect_of(subject, reference)
    assert sampled.p != exact.p, "nothing was sampled"
    assert sampled.p == pytest.approx(exact.p, abs=0.02)
    assert (sampled.low, sampled.high) == (pytest.approx(exact.low, rel=0.002), pytest.approx(exact.high, rel=0.002))


def test_too_few_launches_have_a_ratio_without_an_interval():
    effect = effect_of([2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0])
    assert effect.ratio == pytest.approx(2)
    assert (effect.low, effect.high, effect.p) == (None, None, None)


def test_equal_launches_show_no_difference():
    effect = effect_of([1.0] * 5, [1.0] * 5)
    assert (effect.ratio, effect.low, effect.high, effect.p) == (1, 1, 1, 1)


@pytest.mark.parametrize(("pairs", "launches"), [(1, 5), (4, 6), (17, 7), (64, 8)])
def test_the_number_of_launches_that_can_settle_a_table_grows_with_its_pairs(pairs, launches):
    assert launches_to_settle(pairs) == launches
    assert 2 / math.comb(2 * launches, launches) <= ALPHA / pairs < 2 / math.comb(2 * launches - 2, launches - 1)


def test_holm_multiplies_the_smallest_p_by_all_pairs_and_never_decreases():
    assert holm([0.01, 0.04, 0.03, None]) == [pytest.approx(0.04), pytest.approx(0.09), pytest.approx(0.09), None]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def noisy(launches, factor, seed):
    rng = np.random.default_rng(seed)
    return {number: factor * math.exp(0.02 * rng.normal()) for number in range(1, launches + 1)}


@pytest.mark.parametrize("same_run", [True, False])
@pytest.mark.parametrize("pairs", [1, 6, 28, 100, 765])
def test_more_launches_than_can_settle_all_pairs_settle_a_large_difference_too(pairs, same_run):
    """Whichever exchanges are made, and whether all of them are or a sample."""
    for launches in range(launches_to_settle(pairs), 20):
        effect = estimate_effect(noisy(launches, 2.0, 0), noisy(launches, 1.0, 1), pairs=pairs, same_run=same_run)
        assert effect.p * pairs <= ALPHA, (launches, effect)


def test_a_disturbed_launch_does_not_keep_many_launches_from_settling_one_of_several_hundred_demands():
    """Launches overlap, so that p is that of sampled exchanges: as many as the strict alpha asks for."""
    disturbed = noisy(20, 2.0, 0) | {20: 0.9}
    effect = estimate_effect(disturbed, noisy(20, 1.0, 1), alpha=ALPHA / 400, same_run=False)
    assert effect.low > 1
    assert effect.p <= ALPHA / 400
