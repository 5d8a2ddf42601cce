"""The noise floor of a machine: how it is measured, kept, and used by the gate."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from statistics import median

import numpy as np
import pytest

from benchbox.analysis.baseline import find_baseline, make_baseline
from benchbox.analysis.comparability import verdict_of_effect
from benchbox.analysis.gate import gate
from benchbox.analysis.inference import ALPHA, RELEVANT, Criteria, estimate_effect
from benchbox.analysis.noise import (
    describe_floor,
    drift,
    launches_for,
    measure_noise,
    noise_floor,
    settled_difference,
    smallest_difference,
    split_launches,
    why_not_used,
    with_earlier_runs,
)
from benchbox.analysis.regression import BaselineLookup
from benchbox.analysis.summary import summarize
from benchbox.errors import RecordError
from benchbox.store.baseline import write_baseline
from benchbox.store.machine_cache import machine_file
from benchbox.store.noise import Noise, NoiseRun, read_noise, write_noise
from tests.support.example_run import CELL, MEASURE, example_run, steady_records

NOISE = Noise(sigma=0.01, launches=12, ratio=1.002, cell="backend=ddp", measured_at="2026-01-01", benchbox_version="0.1.0")
STEPS = {"steps": 20, "warm-up steps": 3}
SETUP = {"cell": "backend=ddp", "cell id": "a", **STEPS, "torch": "2.12.0"}


def run_of(launches=5):
    slower = {"metric": "step_time_s", "where": {}, "max_regression": 0.02}
    return example_run([CELL], thresholds=[slower], measure=asdict(MEASURE) | {"launches": launches})


@pytest.mark.parametrize(("sigma", "launches"), [(0.01, 5), (0.03, 6), (0.01, 7), (0.01, 9), (0.03, 10)])
def test_the_smallest_difference_of_a_run_is_found_nine_times_of_ten(sigma, launches):
    """The exact test finds it, also with the few launches that most cells have."""
    rng, found, repetitions = np.random.default_rng(1), 0, 400 if launches < 8 else 100
    for _ in range(repetitions):
        subject, reference = np.exp(rng.normal(0, sigma, (2, launches)))
        subject *= 1 + smallest_difference(sigma, launches)
        p = estimate_effect(dict(enumerate(subject)), dict(enumerate(reference)), same_run=False).p
        found += p is not None and p <= ALPHA
    assert 0.8 <= found / repetitions <= 0.98


def share_of_verdict(verdict, sigma, launches, *, ratio=1.0, relevant=RELEVANT):
    """Return the share of simulated pairs of cells of a run that have a verdict."""
    rng, count, repetitions = np.random.default_rng(2), 0, 400 if launches < 8 else 100
    for _ in range(repetitions):
        subject, reference = np.exp(rng.normal(0, sigma, (2, launches)))
        effect = estimate_effect(dict(enumerate(subject * ratio)), dict(enumerate(reference)))
        count += verdict_of_effect(effect, effect.p, Criteria(relevant=relevant)) == verdict
    return count / repetitions


@pytest.mark.parametrize(("sigma", "launches"), [(0.001, 5), (0.005, 5), (0.03, 5), (0.001, 10), (0.03, 10)])
def test_the_difference_that_launches_of_a_run_settle_has_its_verdict_nine_times_of_ten(sigma, launches):
    """Also where it is the relevance that asks for more than chance does, and where launches are exchanged within rounds."""
    difference = settled_difference(sigma, launches)
    assert 0.8 <= share_of_verdict("improvement", sigma, launches, ratio=1 + difference) <= 0.98


@pytest.mark.parametrize("sigma", [0.0058, 0.009, 0.01])
def test_the_launches_for_equality_settle_it_nine_times_of_ten_and_fewer_less_often(sigma):
    launches = launches_for(sigma, 0.02)
    assert 0.8 <= share_of_verdict("neutral", sigma, launches) <= 0.98
    assert share_of_verdict("neutral", sigma, max(5, launches - 3)) < 0.8


def test_fewer_than_five_launches_settle_nothing_however_little_they_scatter():
    assert launches_for(1e-6, 0.02) == 5


def test_halves_of_launches_are_paired_by_round():
    assert split_launches({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}) == ({1: 1.0, 2: 3.0}, {1: 2.0, 2: 4.0})


def test_the_noise_of_a_cell_is_the_deviation_of_its_launches():
    (summary,) = summarize(run_of(12), steady_records(step_s=0.2, launches=12))
    noise, effect = measure_noise(summary, "backend=ddp", STEPS)
    assert noise.launches == 12
    assert noise.sigma == pytest.approx(0.00085, abs=2e-4)  # tenths of a percent
    assert effect.low < 1 < effect.high
    (run,) = noise.runs
    expected = {"cell": "backend=ddp", "cell id": summary.cell_id, "torch": "2.13.0", **STEPS}
    assert run.setup.items() >= expected.items()
    assert (run.launches, run.sigma) == (12, noise.sigma)
    assert run.mean == pytest.approx(math.log(0.2), abs=1e-3)
    assert run.started_at == min(record["started_at"] for record in summary.ok)


def noise_run(mean=0.0, sigma=0.01, launches=12, day=1, **setup):
    return NoiseRun(
        started_at=f"2026-01-{day:02}T00:00:00+00:00", launches=launches, mean=mean, sigma=sigma, setup=SETUP | setup
    )


def noise_of(*runs):
    """Return the noise of runs as `benchbox noise` keeps it, one run a day."""
    kept = None
    for run in runs:
        alone = replace(NOISE, sigma=run.sigma, launches=run.launches, runs=(run,))
        kept, _ = with_earlier_runs(alone, kept)
    return kept


def drifting_noise(rng, *, drift, runs, sigma=0.01):
    """Return the noise of simulated runs of twelve launches on a machine that drifts between them."""
    values = rng.normal(0, drift, (runs, 1)) + rng.normal(0, sigma, (runs, 12))
    return noise_of(*(noise_run(row.mean(), row.std(ddof=1), 12, day) for day, row in enumerate(values, 1)))


@pytest.mark.parametrize("runs", [4, 8])
@pytest.mark.parametrize(("drift", "launches"), [(0.0, 5), (0.01, 20), (0.03, 5)])
def test_equal_runs_of_a_machine_that_drifts_differ_by_more_than_the_noise_floor_in_one_percent_at_most(runs, drift, launches):
    rng, beyond, repetitions = np.random.default_rng(2), 0, 1500
    for _ in range(repetitions):
        floor = noise_floor(drifting_noise(rng, drift=drift, runs=runs), launches)
        pair = rng.normal(0, drift, (2, 1)) + rng.normal(0, 0.01, (2, launches))
        beyond += abs(np.subtract(*pair.mean(axis=1))) > math.log1p(floor)
    # One percent, and what 1,500 repetitions of it may exceed it by.
    assert beyond / repetitions <= 0.0175


def test_the_drift_between_runs_raises_the_noise_floor_and_no_number_of_launches_lowers_it_below_the_drift():
    rng = np.random.default_rng(3)
    still, drifting = (drifting_noise(rng, drift=size, runs=12) for size in (0.0, 0.02))
    for noise, size in ((still, 0.0), (drifting, 0.02)):
        assert drift(noise.runs) == pytest.approx(size, abs=0.006)
    # Without drift they say what launches of one run do.
    for launches in (5, 10, 20):
        assert noise_floor(still, launches) == pytest.approx(smallest_difference(still.sigma, launches), rel=0.3)
    assert noise_floor(drifting, 10_000) > 4 * math.sqrt(2) * 0.01
    assert smallest_difference(drifting.sigma, 10_000) < 0.001
    assert noise_floor(still, 20) >= smallest_difference(still.sigma, 20) * 0.99


def test_runs_that_happen_to_agree_never_make_the_noise_floor_lower_than_that_of_their_launches():
    agreeing = noise_of(*(noise_run(day=day) for day in range(1, 7)))
    assert drift(agreeing.runs) == 0
    for launches in (5, 12, 40):
        assert noise_floor(agreeing, launches) >= smallest_difference(0.01, launches) * 0.95


def test_the_drift_is_what_the_means_of_runs_vary_by_beyond_their_launches():
    runs = [noise_run(0.00, 0.02, 10, 1), noise_run(0.06, 0.04, 20, 2)]
    explained = (0.02**2 / 10 + 0.04**2 / 20) / 2
    assert drift(runs) == pytest.approx(math.sqrt(0.06**2 / 2 - explained))
    assert drift(runs[:1]) is None


def test_fewer_than_four_runs_say_nothing_about_drift():
    far_apart = [noise_run(0.1 * day, day=day) for day in range(1, 5)]
    three = noise_of(*far_apart[:3])
    assert noise_floor(three, 5) == smallest_difference(0.01, 5)
    assert (
        describe_floor(three, 5)
        == f"{smallest_difference(0.01, 5):.1%} with 5 launches, without the drift between runs: 3 of 4 runs"
    )
    four = noise_of(*far_apart)
    assert noise_floor(four, 5) > 0.5
    assert describe_floor(four, 5) == f"{noise_floor(four, 5):.1%} with 5 launches, of 4 runs within 3.0 days"
    assert describe_floor(NOISE, 5).endswith(": 1 of 4 runs"), "kept by an earlier version"


def test_runs_are_pooled_in_the_order_of_their_time():
    noise = noise_of(noise_run(0.02, 0.03, 11, 5), noise_run(0.01, 0.01, 21, 2))
    assert [run.mean for run in noise.runs] == [0.01, 0.02]
    assert noise.launches == 32
    assert noise.sigma == pytest.approx(math.sqrt((10 * 0.03**2 + 20 * 0.01**2) / 30))


def test_a_run_that_has_more_launches_now_replaces_itself():
    noise = noise_of(noise_run(0.02, 0.01, 10, 5), noise_run(0.03, 0.02, 15, 5))
    assert noise.runs == (noise_run(0.03, 0.02, 15, 5),)
    assert (noise.launches, noise.sigma) == (15, 0.02)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cell": "backend=zero2", "cell id": "b"}, "cell backend=ddp against backend=zero2"),
        ({"cell id": "b"}, "cell id a against b"),
        ({"steps": 40}, "steps 20 against 40"),
        ({"torch": "2.13.0"}, "torch 2.12.0 against 2.13.0"),
    ],
)
def test_runs_of_another_setup_do_not_count_until_a_run_is_of_theirs(changes, reason):
    known = noise_of(noise_run(0.0, 0.03, 20, day=1), noise_run(0.2, 0.03, 20, day=2))
    other = replace(NOISE, runs=(noise_run(0.1, 0.02, 12, day=3, **changes),))
    apart, why = with_earlier_runs(other, known)
    assert (apart.runs, apart.other_runs, why) == (other.runs, known.runs, reason)
    assert (apart.launches, apart.sigma) == (12, 0.02)
    back, why = with_earlier_runs(replace(NOISE, runs=(noise_run(0.3, 0.03, 20, day=4),)), apart)
    assert [run.mean for run in back.runs] == [0.0, 0.2, 0.3]
    assert back.other_runs == other.runs
    assert why is not None
    assert (back.launches, back.sigma) == (60, pytest.approx(0.03))


def test_what_one_run_does_not_know_makes_no_difference():
    assert len(noise_of(noise_run(day=1), noise_run(day=2, nccl="2.27")).runs) == 2


def test_runs_of_another_policy_source_do_not_count():
    records = [
        record | {"environment": record["environment"] | {"policy_sha256": "1" * 64}}
        for record in steady_records(step_s=0.2, launches=12)
    ]
    kept = None
    for source in ("1", "1", "2"):
        sources = [record | {"environment": record["environment"] | {"policy_sha256": source * 64}} for record in records]
        (summary,) = summarize(run_of(12), sources)
        noise, _ = measure_noise(summary, "it", STEPS)
        day = 1 + len([] if kept is None else kept.runs)
        noise = replace(noise, runs=(replace(noise.runs[0], started_at=f"2026-01-{day:02}T00:00:00+00:00"),))
        kept, reason = with_earlier_runs(noise, kept)
    assert (len(kept.runs), len(kept.other_runs)) == (1, 2)
    assert reason.startswith("policy_sha256 111")


def test_launches_of_two_versions_measure_no_noise():
    records = steady_records(step_s=0.2, launches=12)
    for record in records[:6]:
        record["environment"] = record["environment"] | {"torch": "1.0"}
    (summary,) = summarize(run_of(12), records)
    with pytest.raises(RecordError, match=r"launches of it differ in torch: 1\.0, 2\.13\.0"):
        measure_noise(summary, "it", STEPS)


def test_too_few_launches_measure_no_noise():
    (summary,) = summarize(run_of(), steady_records(step_s=0.2))
    with pytest.raises(RecordError, match="5 launches of it ended ok, and 10 are needed"):
        measure_noise(summary, "it", STEPS)


def test_noise_is_kept_by_machine_and_matrix(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_noise("a-machine") == {}
    write_noise("a-machine", "one", NOISE)
    path = write_noise("a-machine", "other", replace(NOISE, sigma=0.02))
    assert path == machine_file("noise", "a-machine") == tmp_path / "benchbox" / "noise" / "a-machine.json"
    assert read_noise("a-machine")["one"] == NOISE
    drifting = noise_of(
        *(noise_run(0.1 * day, day=day) for day in range(1, 5)),
        noise_run(0.1, day=9, torch="2.13.0"),
        noise_run(0.5, day=10),
    )
    write_noise("a-machine", "drifting", drifting)
    assert read_noise("a-machine")["drifting"] == drifting
    path.write_text('{"schema_version": 1, "machine": "a-machine", "matrices": {"one": {"sigma": "much"}}}')
    with pytest.raises(RecordError, match="delete it and run benchbox noise again"):
        read_noise("a-machine")


def baseline_of(records):
    run = run_of()
    return make_baseline(run, summarize(run, records), "example-cpu-2-cores")


@pytest.mark.parametrize(("sigma", "verdict"), [(0.001, "breach"), (0.03, "inconclusive")])
def test_a_difference_within_the_noise_floor_is_no_breach(sigma, verdict):
    baseline = baseline_of(steady_records(step_s=0.2, started="2025-12-31"))
    lookup = BaselineLookup(baseline, None, replace(NOISE, sigma=sigma))
    run = run_of()
    row = gate(run, summarize(run, steady_records(step_s=0.21)), lookup)[-1]
    assert row.verdict == verdict
    assert (row.note is None) == (verdict == "breach")


def test_the_noise_floor_is_that_of_the_side_with_fewer_launches():
    """With sigma 0.015 it is 5.5% for the 5 launches of the baseline, and 2.9% for the 10 of the run."""
    baseline = baseline_of(steady_records(step_s=0.2, started="2025-12-31"))
    run = run_of(10)
    summaries = summarize(run, steady_records(step_s=0.21, launches=10))
    assert gate(run, summaries, BaselineLookup(baseline, None, replace(NOISE, sigma=0.015)))[-1].verdict == "inconclusive"
    assert gate(run, summaries, BaselineLookup(baseline, None, replace(NOISE, sigma=0.01)))[-1].verdict == "breach"


def test_a_difference_that_the_machine_drifts_by_between_runs_is_no_breach():
    baseline = baseline_of(steady_records(step_s=0.2, started="2025-12-31"))
    run = run_of()
    for apart, verdict in ((0.0, "breach"), (0.02, "inconclusive")):
        noise = noise_of(*(noise_run(apart * day, 0.001, day=day) for day in range(1, 5)))
        row = gate(run, summarize(run, steady_records(step_s=0.21)), BaselineLookup(baseline, None, noise))[-1]
        assert row.verdict == verdict
    assert row.note == f"the difference is within the noise floor of this machine, {noise_floor(noise, 5):.1%}"


@pytest.mark.parametrize(("key", "value"), [("benchbox", "0.0.9"), ("nccl", "2.1"), ("torch", "2.10.0")])
def test_a_baseline_of_another_benchbox_or_nccl_is_not_like_for_like(key, value, tmp_path):
    known = {"benchbox": "0.1.0", "nccl": "2.27"}
    records = [r | {"environment": {**r["environment"], **known}} for r in steady_records(step_s=0.2)]
    old = [r | {"environment": {**r["environment"], key: value}} for r in records]
    path = tmp_path / "b.json"
    write_baseline(path, replace(baseline_of(old), started_at=()))
    lookup = find_baseline(run_of(), records, path)
    assert lookup.baseline is None
    assert f"is not like for like with this run: {key} " in lookup.remedy
    for unchanged in ("policy_sha256", "benchbox_sha256"):
        same = [r | {"environment": {**r["environment"], unchanged: "1" * 64}} for r in records]
        write_baseline(path, replace(baseline_of(same), started_at=()))
        assert find_baseline(run_of(), records, path).baseline is not None


def test_a_utilisation_has_the_noise_of_the_step_time_it_is_computed_from():
    def with_mfu(records):
        return [record | {"mfu": 0.08 / median(record["step_time_s"]["slowest"])} for record in records]

    baseline = baseline_of(with_mfu(steady_records(step_s=0.2, started="2025-12-31")))
    run = replace(run_of(), thresholds=[{"metric": "mfu", "max_regression": 0.02}])
    lookup = BaselineLookup(baseline, None, replace(NOISE, sigma=0.03))
    assert gate(run, summarize(run, with_mfu(steady_records(step_s=0.21))), lookup)[-1].verdict == "inconclusive"


def test_a_floor_whose_set_up_is_not_known_is_used():
    """Files of earlier versions have no runs."""
    environment = {2: {"machine": "m", "torch": "2.13.0", "variables": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}}
    assert why_not_used(NOISE, environment, {"steps": 5}) is None
    assert why_not_used(replace(NOISE, runs=(noise_run(torch="1.0"),)), environment, {}) == "torch 2.13.0 against 1.0"
