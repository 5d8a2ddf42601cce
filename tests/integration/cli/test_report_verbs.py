"""`report`, `check`, `baseline promote` and `verify` as a user runs them."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchbox.errors import EXIT_INCONCLUSIVE, EXIT_OK, EXIT_THRESHOLD, EXIT_USAGE
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process as benchbox
from tests.support.example_run import CELL, MEASURE, example_record, example_run, steady_records, write_example


@pytest.fixture
def complete(tmp_path):
    store = RunStore(tmp_path / "whole")
    regression = {"metric": "step_time_s", "where": {}, "max_regression": 0.05}
    store.write_run(example_run([CELL], thresholds=[regression], measure=asdict(MEASURE) | {"launches": 5}))
    for record in steady_records(step_s=0.2):
        store.write_record(record)
    return store


def test_a_failed_cell_fails_the_check_with_one_line_and_exit_code_4(tmp_path):
    result = benchbox("check", write_example(tmp_path).path)
    assert result.returncode == EXIT_THRESHOLD
    assert result.stderr == f"error: 1 of 8 demands on {tmp_path} are not met\n"
    table = result.stdout.splitlines()
    assert table[0].split() == ["cell", "metric", "expected", "found", "verdict"]
    assert table[3].split()[-4:] == ["status", "ok", "oom", "breach"]


def test_a_run_is_compared_with_the_baseline_that_was_promoted(complete, tmp_path):
    before = benchbox("check", complete.path, cwd=tmp_path)
    assert before.returncode == EXIT_THRESHOLD
    remedy = (
        "no baseline reports/baselines/example-cpu-2-cores/example.json; promote a run you trust: benchbox baseline promote RUN"
    )
    assert f"note: {remedy}\n" in before.stdout
    assert before.stderr == f"error: missing: 1 of 2 demands on {complete.path} cannot be judged: {remedy}\n"
    verdict = json.loads(benchbox("check", complete.path, "--format", "json", cwd=tmp_path).stdout)
    assert (verdict["verdict"], [row["verdict"] for row in verdict["rows"]]) == ("missing", ["ok", "missing"])
    promoted = benchbox("baseline", "promote", complete.path, cwd=tmp_path)
    assert promoted.returncode == EXIT_OK
    assert (tmp_path / "reports/baselines/example-cpu-2-cores/example.json").is_file()
    own = benchbox("check", complete.path, cwd=tmp_path)
    assert own.returncode == EXIT_THRESHOLD
    assert "was promoted from this run" in own.stderr
    measure_again(complete, step_s=0.201)
    assert benchbox("check", complete.path, cwd=tmp_path).returncode == EXIT_OK
    measure_again(complete, step_s=0.22)
    slower = benchbox("check", complete.path, "--format", "json", cwd=tmp_path)
    assert slower.returncode == EXIT_THRESHOLD
    verdict = json.loads(slower.stdout)
    assert verdict["verdict"] == "breach"
    assert [row["verdict"] for row in verdict["rows"]] == ["ok", "breach"]
    assert verdict["rows"][1]["expected"].startswith("<= ")


def test_what_launches_do_not_settle_is_inconclusive_and_fails_on_request(complete, tmp_path):
    assert benchbox("baseline", "promote", complete.path, cwd=tmp_path).returncode == EXIT_OK
    measure_again(complete, step_s=0.209)
    complete.write_record(example_record(launch=5, step_s=0.6))
    result = benchbox("check", complete.path, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (
        EXIT_OK,
        f"inconclusive: launches do not settle 1 of 2 demands on {complete.path}\n",
    )
    assert (
        "note: backend=ddp: launches do not settle whether it is worse: more of them, or a quieter host, can" in result.stdout
    )
    assert benchbox("check", complete.path, "--strict", cwd=tmp_path).returncode == EXIT_INCONCLUSIVE


def measure_again(store, *, step_s):
    for record in steady_records(step_s=step_s, started="2026-01-02"):
        store.write_record(record)


def test_a_run_with_holes_is_no_baseline(tmp_path):
    result = benchbox("baseline", "promote", write_example(tmp_path / "run").path, "--out", tmp_path / "b")
    assert result.returncode == EXIT_THRESHOLD
    assert "1 of 8 cells are not ok in all 2 launches" in result.stderr
    assert not (tmp_path / "b").exists()


def test_verify_counts_satisfied_invariants_and_names_violations(complete):
    good = benchbox("verify", complete.path)
    assert good.returncode == EXIT_OK
    assert good.stdout.splitlines()[-1] == "5 records, every invariant that applies holds"
    record = example_record(launch=2)
    record["throughput"]["global_samples_per_s"] *= 8
    complete.write_record(record)
    bad = benchbox("verify", complete.path)
    assert bad.returncode == EXIT_THRESHOLD
    assert f"{CELL.cell_id} launch 2: throughput follows from the slowest rank's step times: " in bad.stdout
    assert bad.stderr == f"error: violations in 5 records of {complete.path}: 1\n"


def test_report_prints_the_table_and_where_it_wrote(complete, tmp_path):
    second = write_example(tmp_path / "other").path
    one = benchbox("report", complete.path)
    assert one.returncode == EXIT_OK
    assert one.stdout.splitlines()[-4:] == [
        str(complete.path / name) for name in ("report.html", "report.md", "table.csv", "table.parquet")
    ]
    both = benchbox("report", complete.path, second, "--out", tmp_path / "out")
    assert both.returncode == EXIT_OK
    assert (tmp_path / "out" / "whole" / "report.html").is_file()
    assert (tmp_path / "out" / "other" / "report.html").is_file()
    same = benchbox("report", complete.path, complete.path, "--out", tmp_path / "out")
    assert same.returncode == EXIT_USAGE


@pytest.mark.parametrize("out", ["report.txt", "report.txt/reports"])
def test_a_file_in_place_of_the_output_folder_is_one_line_and_exit_code_2(complete, tmp_path, out):
    (tmp_path / "report.txt").write_text("notes")
    result = benchbox("report", complete.path, "--out", out, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (EXIT_USAGE, "")
    assert result.stderr == f"error: --out {out}: report.txt is a file; name a folder: it gets several files\n"
    assert (tmp_path / "report.txt").read_text() == "notes"


def test_a_published_run_has_no_cells_folder_and_every_verb_reads_it_as_before(complete, tmp_path):
    published, baseline = tmp_path / "published", tmp_path / "baseline"
    assert benchbox("baseline", "promote", complete.path, "--out", baseline).returncode == EXIT_OK
    measure_again(complete, step_s=0.2)
    packed = benchbox("report", complete.path, "--out", published, "--pack")
    assert packed.returncode == EXIT_OK
    assert packed.stdout.splitlines()[-1] == str(published / "records.parquet")
    assert benchbox("report", complete.path).returncode == EXIT_OK  # verify reads the tables and ratios of both
    names = {"report.html", "report.md", "figures", "table.csv", "table.parquet", "run.json", "chain.jsonl", "records.parquet"}
    assert {path.name for path in published.iterdir()} == names
    assert benchbox("baseline", "promote", published, "--out", tmp_path / "again").returncode == EXIT_OK
    for verb in (["verify"], ["check", "--baseline", baseline], ["check", "--format", "json", "--baseline", baseline]):
        original, again = benchbox(*verb, complete.path), benchbox(*verb, published)
        assert (again.returncode, again.stdout) == (original.returncode, original.stdout) == (EXIT_OK, original.stdout)
    (published / "records.parquet").write_bytes(b"PAR1")
    for verb in ("verify", "check", "report"):
        damaged = benchbox(verb, published)
        assert damaged.returncode == EXIT_USAGE
        assert damaged.stderr.startswith(f"error: {published / 'records.parquet'}: cannot be read as Parquet")
        assert damaged.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", [("report",), ("check",), ("verify",), ("baseline", "promote")])
@pytest.mark.parametrize("defect", ["absent", "damaged"])
def test_what_cannot_be_read_is_one_line_and_exit_code_2(complete, verb, defect, tmp_path):
    path = tmp_path / "absent"
    if defect == "damaged":
        path = complete.path
        record = complete.record_path(CELL.cell_id, 1)
        record.write_text(record.read_text()[:500])
    result = benchbox(*verb, path)
    assert result.returncode == EXIT_USAGE
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_thresholds_of_a_file_replace_those_of_the_matrix(complete, tmp_path):
    """Several matrices may share it."""
    thresholds = tmp_path / "policy.yaml"
    demand = (
        "thresholds:\n  - {metric: step_time_s, max: 0.01, severity: warning}\n  - {metric: global_samples_per_s, min: 1}\n"
    )
    thresholds.write_text(demand)
    warned = benchbox("check", complete.path, "--thresholds", thresholds)
    assert warned.returncode == EXIT_OK, warned.stderr
    assert warned.stdout.splitlines()[2].endswith("warning")
    thresholds.write_text(demand.replace("warning", "error"))
    assert benchbox("check", complete.path, "--thresholds", thresholds).returncode == EXIT_THRESHOLD
    thresholds.write_text(demand.replace("max", "maxx"))
    wrong = benchbox("check", complete.path, "--thresholds", thresholds)
    assert wrong.returncode == EXIT_USAGE
    assert f"{thresholds}:2:27: unknown key 'maxx'" in wrong.stderr
