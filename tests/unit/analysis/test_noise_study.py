"""The A/A study of `reports/noise`: how runs are cut into comparisons, and what is counted."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchbox.analysis.inference import estimate_effect
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, example_run, steady_records
from tests.support.scripts import load_script

STUDY = Path(__file__).parents[3] / "reports" / "noise" / "study.py"


@pytest.fixture(scope="module")
def study():
    return load_script(STUDY)


def launches(count, noise, seed=0):
    """Return samples per second of equal launches, whose logarithms differ by `noise`."""
    values = 100 * np.exp(np.random.default_rng(seed).normal(0, noise, count))
    return dict(enumerate(values.tolist(), start=1))


def test_launches_of_one_cell_alternate_between_the_sides_of_a_comparison(study):
    first, second = study.equal_comparisons({number: float(number) for number in range(1, 26)})
    assert first == ({1: 1.0, 2: 3.0, 3: 5.0, 4: 7.0, 5: 9.0}, {1: 2.0, 2: 4.0, 3: 6.0, 4: 8.0, 5: 10.0})
    assert second[0][1] == 11.0


def test_comparisons_that_lack_a_launch_are_left_out(study):
    values = {number: 1.0 for number in range(1, 31) if number != 15}
    assert len(study.equal_comparisons(values)) == 2
    assert len(study.paired_comparisons(values, dict.fromkeys(range(1, 31), 1.0))) == 5


def test_two_cells_are_compared_in_the_same_rounds(study):
    fast, slow = ({number: speed * number for number in range(1, 11)} for speed in (2.0, 1.0))
    (ours, theirs), (later, _) = study.paired_comparisons(slow, fast)
    assert ours == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}
    assert theirs[5] == 10.0
    assert later == {1: 6.0, 2: 7.0, 3: 8.0, 4: 9.0, 5: 10.0}


def test_equal_launches_give_few_false_alarms_and_slower_ones_are_found(study):
    """With 400 comparisons at 1%, chance gives up to 9 (99 of 100 times)."""
    comparisons = study.equal_comparisons(launches(4_000, noise=0.02))
    equal = Counter(judged.verdict for judged in study.judge(comparisons))
    assert sum(equal.values()) == 400
    assert 0 < equal["improvement"] + equal["regression"] <= 9
    slower = Counter(
        judged.verdict for judged in study.judge(study.slowed(study.equal_comparisons(launches(4_000, noise=0.005))))
    )
    assert slower["regression"] > 390
    assert slower["improvement"] == 0


def test_the_relevance_keeps_small_differences_from_a_verdict(study):
    judged = study.judge(study.slowed(study.equal_comparisons(launches(100, noise=0.001)), 1.01))
    assert all(comparison.is_rejected and comparison.verdict == "neutral" for comparison in judged)
    assert "kept 10 of 10 rejected equalities" in study._sentence("5% slower, scaled", judged)


def test_the_interval_of_a_rate_is_exact(study):
    low, high = study.interval(2, 200)
    assert (round(low, 4), round(high, 4)) == (0.0012, 0.0357)
    assert study.interval(0, 200)[0] == 0.0


def test_a_run_is_read_and_its_verdicts_are_a_table(study, tmp_path, capsys):
    slow = replace(CELL, size="slow")
    store, pair = RunStore(tmp_path / "equal"), RunStore(tmp_path / "pair")
    store.write_run(replace(example_run([CELL]), measure={"warmup_steps": 1, "steps": 4, "launches": 20}))
    pair.write_run(replace(example_run([CELL, slow]), measure={"warmup_steps": 1, "steps": 4, "launches": 5}))
    for record in steady_records(CELL, step_s=0.2, launches=20):
        store.write_record(record)
    for record in [*steady_records(CELL, step_s=0.2), *steady_records(slow, step_s=0.3)]:
        pair.write_record(record)
    study.main([store.path, pair.path])
    text = capsys.readouterr().out
    assert "| equal | 2 | 0 | 0 |" in text
    assert "| 5% slower, injected | 1 | 0 | 1 | 0 | 0 | 0.667x |" in text
    assert "1 of 1 slowdowns are found" in text


def test_a_thousand_rounds_are_compared_within_little_memory():
    tracemalloc.start()
    effect = estimate_effect(launches(1_000, 0.02), launches(1_000, 0.02, seed=1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert effect.method == "exchanged rounds"
    assert abs(effect.ratio - 1) < 0.01
    assert peak < 200 * 2**20
