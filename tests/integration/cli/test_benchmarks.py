"""JSON of pytest-benchmark as `report`, `compare`, `check` and `baseline promote` take it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchbox.errors import EXIT_INCONCLUSIVE, EXIT_OK, EXIT_THRESHOLD, EXIT_USAGE
from tests.support.benchmark_files import benchmark_json
from tests.support.example_run import write_example

NOISE = (1.01, 1.0, 0.99, 1.005, 0.995)  # the first is not the median


def write_benchmarks(path, value, started, **more):
    ratio = {"value": value, "better": "lower", "goal": 1.5}
    path.write_text(json.dumps(benchmark_json({"test_cost": {"with_over_without": ratio} | more}, started=started)))
    return path


@pytest.fixture
def baselines(benchbox, tmp_path):
    """The folder of a baseline that was promoted of five runs."""
    files = [write_benchmarks(tmp_path / f"perf-{run}.json", value, f"run {run}") for run, value in enumerate(NOISE)]
    promoted = benchbox("baseline", "promote", *files)
    assert promoted.returncode == EXIT_OK, promoted.stderr
    assert promoted.stdout.startswith("reports/baselines/example-cpu-2ghz-2-cores/perf.json: 1 ratios of 5 runs")
    return tmp_path / "reports" / "baselines"


def test_options_for_runs_are_refused_with_benchmarks(benchbox, tmp_path):
    path = write_benchmarks(tmp_path / "perf.json", 1.0, "now")
    for options in (("--summary",), ("--figures", "figures"), ("--pack",), ("--memory", "80GiB")):
        refused = benchbox("report", path, *options)
        assert refused.returncode == EXIT_USAGE
        assert refused.stderr == f"error: {path}: is JSON of pytest-benchmark and no run; leave {options[0]} out\n"


def test_a_slowdown_ends_with_exit_code_4_and_noise_with_0(benchbox, baselines, tmp_path):
    noisy = benchbox("check", write_benchmarks(tmp_path / "noisy.json", 1.015, "later"))
    assert noisy.returncode == EXIT_OK, noisy.stdout + noisy.stderr
    slower = benchbox("check", write_benchmarks(tmp_path / "slower.json", 1.2, "later"))
    assert slower.returncode == EXIT_THRESHOLD
    assert slower.stderr == f"error: 1 of 1 demands on {tmp_path / 'slower.json'} are not met\n"
    assert "(baseline 1, 5 runs, " in slower.stdout


def test_a_machine_without_a_baseline_is_inconclusive(benchbox, tmp_path):
    path = write_benchmarks(tmp_path / "perf.json", 1.0, "now")
    checked = benchbox("check", path)
    assert checked.returncode == EXIT_OK
    assert "no baseline reports/baselines/example-cpu-2ghz-2-cores/perf.json" in checked.stdout
    assert benchbox("check", path, "--strict").returncode == EXIT_INCONCLUSIVE


def test_compare_takes_files_and_baselines_but_no_mixture(benchbox, baselines, tmp_path):
    slower = write_benchmarks(tmp_path / "slower.json", 1.2, "later")
    compared = benchbox("compare", baselines / "example-cpu-2ghz-2-cores" / "perf.json", slower)
    assert compared.returncode == EXIT_THRESHOLD
    assert "regression" in compared.stdout
    assert "Ratios are compared with the spread of" in compared.stdout
    mixed = benchbox("compare", write_example(tmp_path / "run").path, slower)
    assert mixed.returncode == EXIT_USAGE
    assert "nothing in common" in mixed.stderr


def test_report_prints_the_ratios_and_writes_files_that_escape_them(benchbox, tmp_path):
    path = write_benchmarks(tmp_path / "perf.json", 1.0, "now", **{"<b>": {"value": 2.0, "better": "higher", "goal": 1.2}})
    reported = benchbox("report", path, "--out", tmp_path / "out")
    assert reported.returncode == EXIT_OK, reported.stderr
    rows = [line.split()[1:] for line in reported.stdout.splitlines() if line.startswith("test_cost ")]
    assert rows == [["with_over_without", "1.000", "-", "lower", "<=", "1.50"], ["<b>", "2.000", "-", "higher", ">=", "1.20"]]
    html = (tmp_path / "out" / "perf.html").read_text()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert "with\\_over\\_without" in (tmp_path / "out" / "perf.md").read_text()


def test_a_baseline_is_reported_by_the_median_and_the_range_of_its_runs(benchbox, baselines):
    reported = benchbox("report", baselines / "example-cpu-2ghz-2-cores" / "perf.json")
    assert reported.returncode == EXIT_OK, reported.stderr
    _, row, summary, *_ = reported.stdout.splitlines()
    assert row.split()[2:] == ["1.000", "0.9900", "to", "1.010", "lower", "<=", "1.50"]
    assert summary.startswith("1 ratios of 5 runs of the tests on example-cpu-2ghz-2-cores")


@pytest.mark.parametrize("content", ['{"benchmarks": 3}', '{"benchmarks": [], "kind": "benchmarks"}'])
@pytest.mark.parametrize("verb", [("report",), ("check",), ("baseline", "promote")])
def test_what_is_no_file_of_benchmarks_is_named_in_one_line(benchbox, tmp_path, content, verb):
    path = tmp_path / "perf.json"
    path.write_text(content)
    refused = benchbox(*verb, path)
    assert refused.returncode == EXIT_USAGE
    assert refused.stderr.startswith(f"error: {path}: ")
    assert refused.stderr.count("\n") == 1


def test_tests_without_ratios_have_their_times_and_a_note_that_nothing_is_compared(benchbox, tmp_path):
    path = tmp_path / "perf.json"
    path.write_text(json.dumps(benchmark_json({"test_cost": {}}, started="2026-01-01T10:20:30")))
    reported = benchbox("report", path)
    header, row, note, summary, *files = reported.stdout.splitlines()
    assert header.split() == ["test", "rounds", "fastest", "median", "slowest"]
    assert row.split() == ["test_cost", "3", "100", "ms", "200", "ms", "400", "ms"]
    assert note.startswith("note: No test recorded a ratio")
    place = "example-cpu-2ghz-2-cores, commit 0123456789"
    assert summary == f"0 ratios of a run of the tests at 2026-01-01T10:20 on {place}."
    assert files == [str(tmp_path / "perf.html"), str(tmp_path / "perf.md")]
    for file in files:
        text = Path(file).read_text()
        assert "Times of a round" in text
        assert "No test recorded a ratio" in text
        assert "Ratios" not in text


def test_thresholds_are_not_for_ratios(benchbox, tmp_path):
    refused = benchbox("check", write_benchmarks(tmp_path / "perf.json", 1.0, "now"), "--thresholds", tmp_path / "t.yaml")
    assert refused.returncode == EXIT_USAGE
    assert refused.stderr.startswith("error: --thresholds is for runs: ")


def test_a_baseline_under_another_name_of_the_machine_is_found_by_that_name(benchbox, tmp_path):
    files = [write_benchmarks(tmp_path / f"perf-{run}.json", value, f"run {run}") for run, value in enumerate(NOISE)]
    assert benchbox("baseline", "promote", *files, "--machine", "CI host").stdout.startswith(
        "reports/baselines/ci-host/perf.json: "
    )
    slower = write_benchmarks(tmp_path / "slower.json", 1.2, "later")
    assert benchbox("check", slower, "--machine", "CI host").returncode == EXIT_THRESHOLD
    assert benchbox("check", slower, "--baseline", "reports/baselines/ci-host/perf.json").returncode == EXIT_THRESHOLD


def test_nothing_but_the_tests_varies_between_benchmarks(benchbox, baselines, tmp_path):
    slower = write_benchmarks(tmp_path / "slower.json", 1.2, "later")
    refused = benchbox("compare", baselines / "example-cpu-2ghz-2-cores" / "perf.json", slower, "--vary", "machine")
    assert refused.returncode == EXIT_USAGE
    assert refused.stderr.startswith("error: --vary is for runs: ")
