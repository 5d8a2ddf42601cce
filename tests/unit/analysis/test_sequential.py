"""Tests that are repeated while launches are added keep the rate of wrong verdicts of one test."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchbox.analysis.inference import ALPHA, RELEVANT, estimate_effect, launches_to_settle
from benchbox.analysis.sequential import MAX_LOOKS, criteria_of, look_at, look_launches, plan_looks
from benchbox.cli.auto_launches import describe_look, run_until_settled
from benchbox.cli.quantities import parse_duration, parse_share
from benchbox.errors import ConfigurationError
from benchbox.launch.runner import RunSummary
from benchbox.report.view import build_report
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, example_run, steady_records

FASTER = replace(CELL, backend="zero2")


def wrong_verdicts(looks, *, alpha, repetitions=500):
    """Return how many of the simulated A/A runs ever call equal cells different, at any look, and stop there."""
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(repetitions):
        # 5% noise: the relevance threshold, which hides small differences, must not be what keeps the rate.
        subject, reference = np.exp(rng.normal(0, 0.05, (2, looks[-1])))
        for launches in looks:
            numbers = range(1, launches + 1)
            ours, theirs = (dict(zip(numbers, values, strict=False)) for values in (subject, reference))
            effect = estimate_effect(ours, theirs, alpha=alpha)
            if effect.p is not None and effect.p <= alpha and not 1 / (1 + RELEVANT) < effect.ratio < 1 + RELEVANT:
                wrong += 1
                break
    return wrong


def test_looking_four_times_is_wrong_as_rarely_as_looking_once_and_without_spending_it_is_not():
    """With 500 repetitions of a rate of 1%, chance gives up to 10 (99 of 100 times)."""
    looks = (5, 6, 7, 8)
    spent, unspent = wrong_verdicts(looks, alpha=ALPHA / len(looks)), wrong_verdicts(looks, alpha=ALPHA)
    assert spent <= 10 < unspent


@pytest.mark.parametrize("pairs", [1, 4, 40])
def test_the_first_look_can_settle_all_pairs_and_looks_grow(pairs):
    looks = look_launches(pairs)
    assert len(looks) == MAX_LOOKS
    assert looks[0] == launches_to_settle(pairs, alpha=ALPHA / MAX_LOOKS)
    assert all(later > earlier for earlier, later in pairwise(looks))


def auto_run(**changes):
    run = example_run([CELL, FASTER], reference={"backend": "ddp"}, **changes)
    return replace(run, sequential=plan_looks(run))


class Launches:
    """Stands in for the processes: a launch of known speed is stored when it is asked for, as `run_matrix` would."""

    def __init__(self, store, *, step_s, at_most=1000):
        self.store, self.step_s, self.at_most = store, step_s, at_most

    def __call__(self, after, up_to, may_start):
        summary = RunSummary()
        for record in [r for cell, s in self.step_s for r in steady_records(cell, step_s=s, launches=up_to)]:
            if self.store.record(record["cell_id"], record["launch"]) is not None:
                continue
            if summary.executed >= self.at_most or not may_start():
                summary.out_of_time, summary.remaining = True, summary.remaining + 1
                continue
            self.store.write_record(record)
            summary.executed += 1
        return summary


class Lines(list):
    def print(self, line, **_):
        self.append(line)


def settle(store, launch, budget_s=None):
    lines = Lines()
    summary = run_until_settled(
        auto_run(), store, launch=launch, label=lambda cell: cell["backend"], budget_s=budget_s, console=lines
    )
    return summary, lines


def test_a_clear_difference_is_settled_at_the_first_look(tmp_path):
    store = RunStore(tmp_path)
    _, lines = settle(store, Launches(store, step_s=[(CELL, 0.2), (FASTER, 0.1)]))
    assert lines == ["look 1 of 6, 7 launches of each cell: 1 of 1 pairs settled"]
    assert store.run().launches == 7


def test_when_the_budget_ends_the_report_judges_no_part_of_a_look_and_the_same_command_continues(tmp_path):
    store, speeds = RunStore(tmp_path), [(CELL, 0.2), (FASTER, 0.1)]
    summary, lines = settle(store, Launches(store, step_s=speeds, at_most=13))
    assert summary.out_of_time
    assert lines == ["look 1 of 6 is not complete: 1 launches are missing"]
    refused = build_report(store.run(), store.records()).headline
    assert (refused.cards, refused.sentences) == ((), ())
    assert "some are missing" in refused.refused[0]
    _, lines = settle(store, Launches(store, step_s=speeds))
    assert lines == ["look 1 of 6, 7 launches of each cell: 1 of 1 pairs settled"]


def test_a_budget_of_nothing_launches_nothing(tmp_path):
    store = RunStore(tmp_path)
    summary, _ = settle(store, Launches(store, step_s=[(CELL, 0.2)]), budget_s=0.0)
    assert (summary.executed, summary.out_of_time) == (0, True)


def test_a_look_says_what_is_not_settled_and_how_many_launches_are_missing():
    run = auto_run(measure={"warmup_steps": 1, "steps": 4, "launches": 7})
    noisy = steady_records(CELL, step_s=0.2, launches=7)
    other = [
        record
        for number in range(1, 8)
        for record in steady_records(FASTER, step_s=0.2 * (1 + 0.1 * (-1) ** number), launches=number)[-1:]
    ]
    look = look_at(run, [*noisy, *other])
    lines = describe_look(look, 1, 6, 7, 10, 2, lambda cell: cell["backend"])
    assert lines[0] == "look 1 of 6, 7 launches of each cell: 0 of 1 pairs settled"
    assert lines[1].startswith("  not settled: zero2: ")
    assert lines[2] == "  3 more launches of each cell until the next look, 6 in all"
    assert "the last look was taken" in describe_look(look, 6, 6, 7, None, 2, lambda cell: cell["backend"])[-1]


def test_the_report_of_such_a_run_quotes_the_confidence_of_a_look():
    run = auto_run(measure={"warmup_steps": 1, "steps": 4, "launches": 7})
    records = [*steady_records(CELL, step_s=0.2, launches=8), *steady_records(FASTER, step_s=0.1, launches=8)]
    report = build_report(run, records)
    assert report.headline.cards[0].evidence.startswith("7 against 7 launches, ")  # the eighth waits for the next look
    assert "with 99.83% confidence: faster" in report.headline.cards[0].evidence
    assert "Pairs were tested after 7, 10, 14, 20, 28, 40 launches" in report.sampling
    assert criteria_of(run).alpha == ALPHA / MAX_LOOKS


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["30", "m", "-1m", "0s", "half an hour"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ConfigurationError, match="write it as 90s, 30m or 2h"):
        parse_duration(text)


def test_a_resolution_is_a_percentage():
    assert parse_share("5%") == 0.05
    with pytest.raises(ConfigurationError, match="write it as 2%"):
        parse_share("0.05")
