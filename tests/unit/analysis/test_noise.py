"""The noise floor of a machine: how it is measured, kept, and used by the gate."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import median

import numpy as np
import pytest

from benchbox.analysis.baseline import find_baseline, make_baseline
from benchbox.analysis.gate import gate
from benchbox.analysis.inference import ALPHA, estimate_effect
from benchbox.analysis.noise import launches_for, measure_noise, noise_floor, noise_of_matrix, split_launches
from benchbox.analysis.regression import BaselineLookup
from benchbox.analysis.summary import summarize
from benchbox.errors import RecordError
from benchbox.store.baseline import write_baseline
from benchbox.store.machine_cache import machine_file
from benchbox.store.noise import Noise, read_noise, write_noise
from tests.support.example_run import CELL, MEASURE, example_run, steady_records

NOISE = Noise(sigma=0.01, launches=12, ratio=1.002, cell="backend=ddp", measured_at="2026-01-01", benchbox_version="0.1.0")


def run_of(launches=5):
    slower = {"metric": "step_time_s", "where": {}, "max_regression": 0.02}
    return example_run([CELL], thresholds=[slower], measure=asdict(MEASURE) | {"launches": launches})


@pytest.mark.parametrize(("sigma", "launches"), [(0.01, 5), (0.03, 6), (0.01, 7), (0.01, 9), (0.03, 10)])
def test_a_difference_of_the_noise_floor_is_found_nine_times_of_ten(sigma, launches):
    """The exact test finds it, also with the few launches that most cells have."""
    rng, found, repetitions = np.random.default_rng(1), 0, 400 if launches < 8 else 100
    for _ in range(repetitions):
        subject, reference = np.exp(rng.normal(0, sigma, (2, launches)))
        subject *= 1 + noise_floor(sigma, launches)
        p = estimate_effect(dict(enumerate(subject)), dict(enumerate(reference)), same_run=False).p
        found += p is not None and p <= ALPHA
    assert 0.8 <= found / repetitions <= 0.98


def test_the_launches_for_a_difference_are_those_whose_floor_it_is():
    launches = launches_for(0.02, 0.02)
    assert noise_floor(0.02, launches) <= 0.02 < noise_floor(0.02, launches - 1)
    assert launches_for(1e-6, 0.02) == 5  # fewer have no interval


def test_halves_of_launches_are_paired_by_round():
    assert split_launches({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}) == ({1: 1.0, 2: 3.0}, {1: 2.0, 2: 4.0})


def test_the_noise_of_a_cell_is_the_deviation_of_its_launches():
    (summary,) = summarize(run_of(12), steady_records(step_s=0.2, launches=12))
    noise, effect = measure_noise(summary, "backend=ddp")
    assert noise.launches == 12
    assert noise.sigma == pytest.approx(0.00085, abs=2e-4)  # tenths of a percent
    assert effect.low < 1 < effect.high


def test_launches_of_two_versions_measure_no_noise():
    records = steady_records(step_s=0.2, launches=12)
    for record in records[:6]:
        record["environment"] = record["environment"] | {"torch": "1.0"}
    (summary,) = summarize(run_of(12), records)
    with pytest.raises(RecordError, match=r"launches of it differ in torch: 1\.0, 2\.13\.0"):
        measure_noise(summary, "it")


def test_too_few_launches_measure_no_noise():
    (summary,) = summarize(run_of(), steady_records(step_s=0.2))
    with pytest.raises(RecordError, match="5 launches of it ended ok, and 10 are needed"):
        measure_noise(summary, "it")


def test_noise_is_kept_by_machine_and_matrix(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_noise("a-machine") == {}
    write_noise("a-machine", "one", NOISE)
    path = write_noise("a-machine", "other", replace(NOISE, sigma=0.02))
    assert path == machine_file("noise", "a-machine") == tmp_path / "benchbox" / "noise" / "a-machine.json"
    noises = read_noise("a-machine")
    assert (noise_of_matrix(noises, "one"), noise_of_matrix(noises, "third").sigma) == (NOISE, 0.02)
    assert noise_of_matrix({}, "one") is None
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
