"""Tests that are repeated while launches are added keep the rate of wrong verdicts of one test."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from benchbox.analysis.inference import ALPHA, RELEVANT, estimate_effect, launches_to_settle
from benchbox.analysis.sequential import MAX_LOOKS, criteria_of, look_at, look_launches, plan_looks
from benchbox.cli.auto_launches import Budget, plan_auto, run_until_settled
from benchbox.cli.quantities import parse_duration, parse_share
from benchbox.errors import ConfigurationError
from benchbox.launch.runner import RunSummary
from benchbox.plan import Plan
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
    looks = (5, 7, 9, 11)
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

    def __init__(self, store, speeds, *, at_most=1000):
        self.store, self.at_most, self.launched = store, at_most, []
        self.speeds = {cell: step_s if isinstance(step_s, tuple) else (step_s, 0.0) for cell, step_s in speeds.items()}

    def __call__(self, launches):
        summary = RunSummary()
        for cell, number in launches:
            if self.store.record(cell.cell_id, number) is not None:
                continue
            if len(self.launched) >= self.at_most:
                summary.out_of_time, summary.remaining = True, summary.remaining + 1
                continue
            self.launched.append((cell, number))
            self.store.write_record(self.record(cell, number))
        return summary

    def record(self, cell, number):
        step_s, noise = self.speeds[cell]
        return steady_records(cell, step_s=step_s * (1 + noise * (-1) ** number), launches=number)[-1]


class Lines(list):
    is_terminal = False

    def print(self, line, **_):
        self.append(str(line))


def settle(store, launch, run=None, selected=None):
    lines, run = Lines(), run or auto_run()
    chosen = run.cells if selected is None else {cell.cell_id for cell in selected}
    summary = run_until_settled(run, store, selected=chosen, launch=launch, label=lambda cell: cell["backend"], console=lines)
    return summary, lines


def test_a_clear_difference_is_settled_at_the_first_look(tmp_path):
    store = RunStore(tmp_path)
    _, lines = settle(store, Launches(store, {CELL: 0.2, FASTER: 0.1}))
    assert lines[0] == "look 1 of 6, after launch 7: 1 of 1 pairs settled"
    assert lines[1].startswith("  settled: zero2: 2.0")
    assert lines[1].endswith(": faster")
    assert lines[2:] == ["stopped: every pair that can be compared is settled"]
    assert store.run().launches == 7


def three_pairs(tmp_path):
    """Return a run of three backends against ddp: two are clear, and one is hidden by its noise. With its launches."""
    others = [replace(CELL, backend=name) for name in ("zero1", "zero2", "zero3")]
    run = example_run([CELL, *others], reference={"backend": "ddp"})
    speeds = {CELL: 0.2, others[0]: 0.1, others[1]: (0.2, 0.3), others[2]: 0.4}
    store = RunStore(tmp_path)
    return replace(run, sequential=plan_looks(run)), store, Launches(store, speeds), others


@pytest.fixture(scope="module")
def settled(tmp_path_factory):
    """The run of three pairs, its launches up to the last look, and what was printed."""
    run, store, launch, others = three_pairs(tmp_path_factory.mktemp("settled"))
    _, lines = settle(store, launch, run)
    return run, store, launch, others, lines


def test_settled_pairs_are_not_launched_again_and_keep_their_verdict(settled):
    run, store, launch, (fast, noisy, slow), lines = settled
    first, *_, last = run.sequential["looks"]
    counts = {cell.backend: sum(cell == launched for launched, _ in launch.launched) for cell in (CELL, fast, noisy, slow)}
    assert counts == {"ddp": last, "zero1": first, "zero2": last, "zero3": first}
    assert f"{run.sequential['looks'][1] - first} more launches of 2 cells until the next look" in "\n".join(lines)
    assert lines[-1].startswith("stopped: the last look was taken, and 1 pair is not settled")
    assert sum("zero1" in line for line in lines) == 1
    order = [cell.backend for cell, _ in launch.launched[:8]]
    assert order[4:] == order[3::-1], "there and back"
    pairs = {fast: "improvement", slow: "regression"}
    assert store.run().sequential["settled"] == {f"{cell.cell_id}/{CELL.cell_id}": word for cell, word in pairs.items()}
    look = look_at(store.run(), store.records())
    assert {pair.subject.cell["backend"]: pair.effect.launches for pair in look.settled} == {
        "zero1": (first, first),
        "zero3": (first, first),
    }
    assert dict(build_report(store.run(), store.records()).counts)["ok"] == 4


def test_cells_that_are_not_selected_are_never_launched(tmp_path):
    run, store, launch, (fast, *_) = three_pairs(tmp_path)
    _, lines = settle(store, launch, run, selected=[CELL, fast])
    assert {cell for cell, _ in launch.launched} == {CELL, fast}
    assert lines[-1] == "stopped: every pair that can be compared is settled"


def test_when_the_budget_ends_the_report_judges_no_part_of_a_look_and_the_same_command_continues(tmp_path):
    store, speeds = RunStore(tmp_path), {CELL: 0.2, FASTER: 0.1}
    summary, lines = settle(store, Launches(store, speeds, at_most=13))
    assert summary.out_of_time
    assert lines == ["the budget ended before look 1 of 6: 1 launch missing, and no pair was judged"]
    refused = build_report(store.run(), store.records()).headline
    assert (refused.cards, refused.sentences) == ((), ())
    assert "some are missing" in refused.refused[0]
    _, lines = settle(store, Launches(store, speeds))
    assert lines[0] == "look 1 of 6, after launch 7: 1 of 1 pairs settled"


def test_a_budget_that_ends_after_a_look_names_the_pairs_that_are_not_settled(tmp_path):
    run, store, launch, _ = three_pairs(tmp_path)
    first = run.sequential["looks"][0]
    launch.at_most = 4 * first + 1
    summary, lines = settle(store, launch, run)
    assert summary.out_of_time
    assert lines[-2].startswith("the budget ended before look 2 of 6: ")
    assert lines[-1].startswith("  not settled: zero2: ")
    assert store.run().launches == first


def test_a_budget_of_nothing_has_no_time():
    assert Budget().has_time()
    assert not Budget(0.0).has_time()


def test_a_run_that_is_repeated_launches_nothing_and_says_the_same(settled):
    run, store, launch, _, lines = settled
    before, launched = store.run(), list(launch.launched)
    _, again = settle(store, launch, run)
    assert (again, launch.launched) == (lines, launched)
    assert store.run().sequential == before.sequential


def test_the_report_of_such_a_run_quotes_the_confidence_of_a_look():
    run = auto_run(measure={"warmup_steps": 1, "steps": 4, "launches": 7})
    records = [*steady_records(CELL, step_s=0.2, launches=8), *steady_records(FASTER, step_s=0.1, launches=8)]
    report = build_report(run, records)
    assert report.headline.cards[0].evidence.startswith("7 against 7 launches, ")  # the eighth waits for the next look
    assert "with 99.83% confidence: faster" in report.headline.cards[0].evidence
    later = "; until all are settled, tests follow after {}; the tests share a probability of 1%."
    assert "Pairs were not tested yet" + later.format("7, 10, 14, 20, 28, 40") in report.sampling
    first, last = (
        build_report(replace(run, sequential={**run.sequential, "looks_taken": taken}), records).sampling for taken in (1, 6)
    )
    assert "Pairs were tested after 7 launches" + later.format("10, 14, 20, 28, 40") in first
    assert "Pairs were tested after 7, 10, 14, 20, 28, 40 launches; the tests share" in last
    assert criteria_of(run).alpha == ALPHA / MAX_LOOKS
    kept = {FASTER.cell_id: "neutral"}  # by an earlier look
    assert criteria_of(replace(run, sequential={**run.sequential, "settled": kept})).settled == kept


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


def test_what_ends_the_looks_is_said(tmp_path):
    """Nothing can be compared, or the pairs that are left are those of cells that were not selected."""
    alone, store = example_run([CELL], reference={"backend": "ddp"}), RunStore(tmp_path / "alone")
    _, lines = settle(store, Launches(store, {CELL: 0.2}), replace(alone, sequential=plan_looks(alone)))
    assert lines[-1] == "stopped: no pair can be compared"
    run, store, launch, (fast, noisy, _) = three_pairs(tmp_path / "pairs")
    launch(list(product((CELL, noisy), range(1, run.sequential["looks"][0] + 1))))
    _, lines = settle(store, launch, run, selected=[fast])
    assert lines[-1].startswith("stopped: ")
    assert lines[-1].endswith(" not settled, of cells that were not selected")


def test_cells_beside_walks_have_the_launches_of_the_matrix():
    run, planned = example_run([CELL, FASTER], reference={"backend": "ddp"}), Plan((CELL, FASTER), ())
    auto = plan_auto(run, planned, 0.05)
    assert (auto.sequential["resolution"], auto.sequential["launches"]) == (0.05, {})
    assert auto.measure == run.measure
    searching = plan_auto(run, Plan((CELL, FASTER), (), (FASTER,)), 0.05)
    assert searching.sequential["launches"] == {CELL.cell_id: 2}
    assert searching.sequential["looks"] == [launches + 1 for launches in auto.sequential["looks"]]
    assert searching.measure == run.measure | {"launches": 1}


def test_the_resolution_of_a_run_decides_which_difference_is_none():
    """The cells differ by 3%."""
    run = example_run([CELL, FASTER], reference={"backend": "ddp"}, measure={"warmup_steps": 1, "steps": 4, "launches": 7})
    records = [*steady_records(CELL, step_s=0.2, launches=7), *steady_records(FASTER, step_s=0.206, launches=7)]
    looks = [look_at(replace(run, sequential=plan_looks(run, resolution)), records) for resolution in (0.02, 0.05)]
    assert [[pair.verdict for pair in look.settled] for look in looks] == [["regression"], ["neutral"]]
