"""Ratios of benchmarks against a baseline: the spread of its runs says what is a change."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from benchbox.analysis.gate import verdict_of
from benchbox.analysis.inference import ALPHA
from benchbox.analysis.ratios import MIN_RUNS, compare_benchmarks, gate_ratios, judge_ratios, merge_runs
from benchbox.errors import ConfigurationError, RecordError
from benchbox.store.benchmarks import Benchmarks, MeasuredRatio, is_benchmarks, read_benchmarks, write_benchmarks_baseline
from tests.support.benchmark_files import benchmark_json

TESTS = [f"tests/perf/test_{name}.py::test_cost" for name in "abcdefghijklmnopqrst"]
SIGMA = 0.01


def run_of_tests(seed: int, *, slower: float = 1.0, tests: int = 20, better: str = "lower") -> Benchmarks:
    """Return a run of tests whose ratios scatter by `SIGMA`; the first one is `slower` times as high."""
    noise = random.Random(seed)
    factors = [slower, *[1.0] * (tests - 1)]
    ratios = [
        MeasuredRatio(test=test, name="a_over_b", better=better, values=(factor * math.exp(noise.gauss(0, SIGMA)),))
        for test, factor in zip(TESTS, factors, strict=False)
    ]
    return Benchmarks(machine="quiet", commit="abc", started_at=(f"2026-01-01T00:{seed:05}",), ratios=tuple(ratios))


def baseline(runs: int = MIN_RUNS, **options) -> Benchmarks:
    return merge_runs([run_of_tests(seed, **options) for seed in range(runs)])


def test_noise_passes_in_all_but_one_of_a_hundred_runs():
    breached = 0
    for trial in range(200):
        seeds = range(10 * trial, 10 * trial + MIN_RUNS)
        base = merge_runs([run_of_tests(seed) for seed in seeds])
        head = run_of_tests(10 * trial + 9)
        breached += any(judgement.verdict == "regression" for judgement in judge_ratios(base, head))
    assert breached <= 5  # 200 runs of 20 ratios: 2 are expected at 1%, and 5 or fewer have 98%


def test_noise_is_named_as_a_change_in_either_direction_in_one_of_a_hundred_comparisons():
    changed = 0
    for trial in range(400):
        base = merge_runs([run_of_tests(seed, tests=2) for seed in range(10 * trial, 10 * trial + MIN_RUNS)])
        comparison = compare_benchmarks(base, run_of_tests(10 * trial + 9, tests=2), names=("base", "head"), relevant=0.0)
        changed += {"regression", "improvement"} & comparison.counts.keys() != set()
    assert changed <= 9  # 4 are expected at 1%, and 9 or fewer have 99%


def test_a_comparison_shares_the_probability_of_a_wrong_change_between_both_directions():
    base, level = baseline(tests=1), {}
    for alpha in (ALPHA, ALPHA / 2):
        (judgement,) = judge_ratios(base, run_of_tests(99, tests=1), relevant=0.0, alpha=alpha)
        level[alpha] = judgement.tolerance
    between = judgement.base * (1 + (level[ALPHA] + level[ALPHA / 2]) / 2)
    head = run_of_tests(99, tests=1)
    head = replace(head, ratios=(replace(head.ratios[0], values=(between,)),))
    assert judge_ratios(base, head, relevant=0.0)[0].verdict == "regression"
    assert compare_benchmarks(base, head, names=("base", "head"), relevant=0.0).counts == {"neutral": 1}


def test_a_slowdown_beyond_the_spread_is_a_regression_and_its_inverse_an_improvement():
    base = baseline()
    for slower, verdict in ((1.4, "regression"), (1 / 1.4, "improvement")):
        verdicts = [judgement.verdict for judgement in judge_ratios(base, run_of_tests(99, slower=slower))]
        assert verdicts == [verdict, *["neutral"] * 19]


def test_a_ratio_of_which_more_is_better_regresses_downwards():
    base = baseline(better="higher")
    (first, *_) = judge_ratios(base, run_of_tests(99, better="higher", slower=1 / 1.4))
    assert first.verdict == "regression"
    assert first.head < first.limit < first.base


def test_more_runs_and_less_spread_narrow_the_tolerance_down_to_what_is_relevant():
    head = run_of_tests(99)
    few, more = (judge_ratios(baseline(runs), head)[0].tolerance for runs in (5, 20))
    assert few > 1.5 * more
    exact = replace(baseline(), ratios=tuple(replace(ratio, values=(1.0,) * 5) for ratio in baseline().ratios))
    assert judge_ratios(exact, head, relevant=0.03)[0].tolerance == 0.03


def test_one_run_against_one_run_settles_nothing():
    (first, *_) = judge_ratios(run_of_tests(1), run_of_tests(2, slower=3.0))
    assert (first.verdict, first.limit) == ("inconclusive", None)
    assert "promote" in first.reason


@pytest.mark.parametrize("change", [{"machine": "other"}, {"started_at": ("2026-01-01T00:00000",)}])
def test_another_machine_and_the_same_run_are_not_compared(change):
    judgements = judge_ratios(baseline(), replace(run_of_tests(99, slower=3.0), **change))
    assert {judgement.verdict for judgement in judgements} == {"incomparable"}


def test_a_test_that_disappeared_fails_the_gate_and_a_new_one_does_not(tmp_path):
    path = tmp_path / "perf.json"
    write_benchmarks_baseline(path, baseline(tests=19))
    assert is_benchmarks(path)
    added = gate_ratios(run_of_tests(99, tests=20), path)
    assert [row.verdict for row in added].count("inconclusive") == 1
    assert verdict_of(added) == "inconclusive"
    removed = gate_ratios(run_of_tests(99, tests=18), path)
    assert verdict_of(removed) == "missing"
    assert removed[-1].file == TESTS[18].partition("::")[0]


def test_the_folder_of_baselines_has_one_for_each_machine(tmp_path):
    head = run_of_tests(99, slower=1.4)
    (first, *_) = gate_ratios(head, tmp_path)
    assert first.verdict == "inconclusive"
    assert str(tmp_path / "quiet" / "perf.json") in first.note
    write_benchmarks_baseline(tmp_path / "quiet" / "perf.json", baseline())
    assert gate_ratios(head, tmp_path)[0].verdict == "breach"


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([run_of_tests(seed) for seed in range(4)], "4 runs"),
        ([run_of_tests(0)] * 5, "same run"),
        ([*(run_of_tests(seed) for seed in range(4)), run_of_tests(5, tests=3)], "not every file has"),
        ([*(run_of_tests(seed) for seed in range(4)), replace(run_of_tests(5), machine="b")], "several machines"),
        ([replace(run_of_tests(seed), ratios=()) for seed in range(5)], "no ratios"),
    ],
)
def test_a_baseline_needs_several_complete_runs_of_one_machine(runs, message):
    with pytest.raises(RecordError, match=message):
        merge_runs(runs)


def test_runs_of_new_tests_are_added_to_a_baseline_that_lacks_their_ratios():
    """Also a ratio that the tests no longer have goes."""
    older = baseline(tests=3)
    added = [run_of_tests(seed, tests=5) for seed in range(20, 20 + MIN_RUNS)]
    merged = merge_runs([replace(older, ratios=older.ratios[1:]), *(replace(run, ratios=run.ratios[:-1]) for run in added)])
    assert {ratio.test: len(ratio.values) for ratio in merged.ratios} == dict(zip(TESTS, (5, 10, 10, 5), strict=False))
    kept = merge_runs([older, *(replace(run, ratios=run.ratios[1:]) for run in added)])
    assert [ratio.test for ratio in kept.ratios] == TESTS[1:5]
    with pytest.raises(RecordError, match=r"4 runs have the ratio a_over_b of .*test_d.*, which is new"):
        merge_runs([older, *added[1:]])


def test_runs_of_another_day_widen_a_baseline_by_the_difference_of_the_days(tmp_path):
    path = tmp_path / "perf.json"
    write_benchmarks_baseline(path, replace(baseline(), machine="the-host"))
    first_day = replace(read_benchmarks(path), machine="the-host")
    second_day = [replace(run_of_tests(seed, slower=1.3), machine="The Host") for seed in range(20, 23)]
    both = merge_runs([first_day, *second_day])
    assert len(both.started_at) == MIN_RUNS + 3
    assert [len(ratio.values) for ratio in both.ratios] == [MIN_RUNS + 3] * 20
    head = replace(run_of_tests(99, slower=1.3), machine="the-host")
    assert judge_ratios(first_day, head)[0].verdict == "regression"
    assert [judgement.verdict for judgement in judge_ratios(both, head)] == ["neutral"] * 20
    worse = replace(run_of_tests(99, slower=3.0), machine="the-host")
    assert judge_ratios(both, worse)[0].verdict == "regression"
    with pytest.raises(RecordError, match="same run"):
        merge_runs([both, second_day[0]])


def test_a_comparison_names_the_ratios_and_refuses_unknown_ones():
    comparison = compare_benchmarks(baseline(), run_of_tests(99, slower=1.4), names=("old", "new"), metrics=["a_over_b"])
    assert comparison.counts == {"regression": 1, "neutral": 19}
    with pytest.raises(ConfigurationError, match="b_over_a"):
        compare_benchmarks(baseline(), run_of_tests(99), names=("old", "new"), metrics=["b_over_a"])


@pytest.mark.parametrize(
    ("flags", "name"), [(["avx", "avx2"], "cpu @ 2ghz-avx2-2-cores"), (["avx2", "avx512f"], "cpu @ 2ghz-2-cores")]
)
def test_a_processor_without_avx512_is_another_machine(tmp_path, flags, name):
    """Names are those of environments of launches. Beside a processor of one name with AVX-512 it is no regression."""
    content = benchmark_json({"test_a": {"a_over_b": {"value": 2, "better": "higher"}}})
    content["machine_info"]["cpu"]["flags"] = flags
    (tmp_path / "perf.json").write_text(json.dumps(content))
    assert read_benchmarks(tmp_path / "perf.json").machine == f"example {name}"


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "perf.json"
    path.write_text(json.dumps(benchmark_json({"test_a": {"a_over_b": {"value": 2, "better": "higher", "rounds": [1, 2, 3]}}})))
    benchmarks = read_benchmarks(path)
    assert benchmarks.machine == "example cpu @ 2ghz-2-cores"
    (ratio,) = benchmarks.ratios
    assert (ratio.values, ratio.better, ratio.rounds, ratio.goal) == ((2.0,), "higher", (1, 2, 3), None)
    (timing,) = benchmarks.timings
    assert (timing.rounds, timing.median_s) == (3, 0.2)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "not an object"),
        ({"value": 1.0}, "missing better"),
        ({"value": "1", "better": "lower"}, "and a number"),
        ({"value": 0, "better": "lower"}, "positive"),
        ({"value": 1.0, "better": "less"}, "'less'"),
    ],
)
def test_what_is_no_ratio_is_refused_with_its_test(tmp_path, entry, message):
    path = tmp_path / "perf.json"
    path.write_text(json.dumps(benchmark_json({"test_a": {"a_over_b": entry}})))
    with pytest.raises(RecordError, match=message) as caught:
        read_benchmarks(path)
    assert "test_a" in str(caught.value)


def test_an_improvement_passes_and_asks_for_new_runs_so_that_the_gate_holds_it(tmp_path):
    path = tmp_path / "perf.json"
    write_benchmarks_baseline(path, baseline())
    (first, second, *_) = gate_ratios(run_of_tests(99, slower=1 / 1.4), path)
    assert (first.verdict, second.verdict, second.note) == ("ok", "ok", None)
    assert first.note.startswith("better than the spread of the baseline explains: promote new runs")
    assert first.expected.startswith("<= ")
    assert f" {MIN_RUNS} runs, " in first.expected


def test_a_run_of_tests_without_ratios_is_not_checked(tmp_path):
    with pytest.raises(RecordError, match="there is nothing to check"):
        gate_ratios(replace(run_of_tests(99), ratios=()), tmp_path)


def test_one_run_on_each_side_has_no_spread_and_settles_nothing():
    judgement, *_ = judge_ratios(run_of_tests(1), run_of_tests(2, slower=3.0))
    assert (judgement.verdict, judgement.limit) == ("inconclusive", None)
    assert judgement.reason == "one run on each side has no spread: promote a baseline"
