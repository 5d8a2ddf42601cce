"""A run as data frames."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import pandas as pd
import pytest

import benchbox
from benchbox.analysis.baseline import slug
from benchbox.errors import ConfigurationError, RecordError
from benchbox.store.peaks import write_peaks
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, MEASURE, OOM, example_record, example_run, steady_records, write_example
from tests.support.peaks import made_up_peaks

PUBLISHED = Path(__file__).parents[3] / "reports"


@pytest.fixture
def results(tmp_path):
    return benchbox.load(write_example(tmp_path).path)


def write_run(folder, *records):
    """Write a run of these launches and return its folder."""
    cells = {record["cell_id"]: record["cell"] for record in records}
    measure = asdict(MEASURE) | {"launches": max(record["launch"] for record in records)}
    store = RunStore(folder)
    store.write_run(replace(example_run([CELL], measure=measure), cells=cells))
    for record in records:
        store.write_record(record)
    return folder


def test_cells_have_their_fields_metrics_and_verdicts_in_the_order_of_the_plan(results):
    cells = results.cells
    assert list(cells.index) == list(results.run.cells)
    assert list(cells["backend"].unique()) == ["fsdp1_full", "zero2"]
    assert list(cells["optim.lr"].unique()) == [CELL.optim.lr]
    assert cells["status"].value_counts().to_dict() == {"ok": 7, "oom": 1}
    ok = cells[cells["status"] == "ok"]
    assert (ok["step_time_s_low"] <= ok["step_time_s"]).all()
    assert (ok["step_time_s"] <= ok["step_time_s_high"]).all()
    assert cells[cells["status"] == "oom"]["step_time_s"].isna().all()
    pairs = cells[cells["backend"] == "fsdp1_full"]
    assert set(pairs["verdict"]) == {"inconclusive", "incomparable"}
    assert pairs["ratio"].dropna().tolist() == pytest.approx([0.2 / 0.31] * 3, rel=1e-6)
    assert cells[cells["backend"] == "zero2"]["verdict"].isna().all(), "the reference is compared with nothing"


def test_the_ratio_of_a_pair_lies_within_its_interval(tmp_path):
    speeds = {"fsdp1_full": 0.31, "zero2": 0.2}
    records = [
        record
        for backend, step_s in speeds.items()
        for record in steady_records(replace(CELL, backend=backend), step_s=step_s, launches=5)
    ]
    pair, _ = benchbox.load(write_run(tmp_path, *records)).cells.to_dict("records")
    assert pair["verdict"] == "regression"
    assert pair["ratio_low"] < pair["ratio"] < pair["ratio_high"]


def test_launches_are_the_rows_of_the_table(results):
    expected = [(record["cell_id"], record["launch"]) for record in results.records]
    assert list(zip(results.launches["cell_id"], results.launches["launch"], strict=True)) == expected


def test_steps_of_the_slowest_rank_give_the_step_time_of_the_record(results):
    steps = results.steps
    assert set(steps["rank"]) == {0, 1}
    warmup = steps[steps["step"] < MEASURE.warmup_steps]
    assert warmup["step_time_s"].isna().all()
    assert warmup["loss"].notna().all()
    for record in results.records:
        rows = steps[(steps["cell_id"] == record["cell_id"]) & (steps["launch"] == record["launch"])]
        if record["status"] != "ok":
            assert rows.empty
            continue
        slowest = rows.dropna(subset="step_time_s").groupby("step")["step_time_s"].max()
        assert list(slowest) == record["step_time_s"]["slowest"]
        assert list(rows[rows["rank"] == 0]["loss"]) == record["loss"]
    phases = steps.dropna(subset="step_time_s")
    total = phases[[name for name in phases if name.endswith("_s") and name != "step_time_s"]].sum(axis=1)
    assert list(total) == pytest.approx(list(phases["step_time_s"]))


def test_the_report_has_what_the_run_directory_and_the_machine_know(tmp_path, monkeypatch):
    """Peaks of this machine, for example, as on the page."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = RunStore(tmp_path / "run")
    store.write_run(example_run([CELL]))
    record = example_record()
    record["environment"]["threads"] = 1
    record["precision"]["census"].append({**record["precision"]["census"][0], "kind": "product", "dtype": "bfloat16"})
    store.write_record(record)
    write_peaks(slug(record["environment"]["machine"]), made_up_peaks())
    (cell,) = benchbox.load(store.path).report.observed
    assert any("forward runs at" in item.observed for item in cell.observations if item.name == "share of the peaks")


def test_steps_have_the_loss_and_the_gradient_norm_of_the_record(tmp_path):
    record = example_record()
    record["grad_norm"] = [10 * norm for norm in record["grad_norm"]]
    steps = benchbox.load(write_run(tmp_path, record)).steps
    for _, rows in steps.groupby("rank"):
        assert (list(rows["loss"]), list(rows["grad_norm"])) == (record["loss"], record["grad_norm"])


def test_findings_name_their_launch_and_keep_their_evidence(tmp_path):
    finding = {
        "code": "BXP101", "severity": "error", "title": "t", "where": "w", "rank": 1, "cause": None, "repair": "r",
        "evidence": {"ranks": [1]}, "locations": [],
    }  # fmt: skip
    record = example_record()
    record["precision"]["findings"] = [finding]
    (row,) = benchbox.load(write_run(tmp_path, record)).findings.to_dict("records")
    assert (row["cell_id"], row["launch"], row["code"], row["rank"]) == (CELL.cell_id, 1, "BXP101", 1)
    assert json.loads(row["evidence"]) == {"ranks": [1]}


def test_a_run_without_findings_has_their_columns(results):
    assert results.findings.empty
    assert "severity" in results.findings


def test_steps_have_their_columns_where_no_launch_took_one(tmp_path, results):
    steps = benchbox.load(write_run(tmp_path / "failed", example_record(status="oom", error=OOM))).steps
    assert steps.empty
    assert list(steps) == [name for name in results.steps if not name.endswith("_s") or name == "step_time_s"]


def test_a_notebook_shows_the_table_and_the_answer_escaped(tmp_path):
    shown = benchbox.load(write_example(tmp_path, policy="<b>pi</b>").path)._repr_html_()
    assert shown.count("<tr>") == 1 + 8
    assert "<th>backend</th>" in shown
    assert "<b>pi</b>" not in shown
    assert "Fastest of " in shown


@pytest.mark.parametrize(
    "path", sorted(path.parent for path in PUBLISHED.glob("*/records.parquet")), ids=lambda path: path.name
)
def test_published_runs_load(path):
    results = benchbox.load(path)
    ok = results.launches[results.launches["status"] == "ok"]
    assert len(results.cells) == len(results.run.cells)
    by_launch = ok.groupby("cell_id")["global_samples_per_s"].apply(lambda values: median(values.astype(float)))
    assert results.cells["global_samples_per_s"].dropna().to_dict() == pytest.approx(by_launch.to_dict())
    assert isinstance(results.steps, pd.DataFrame)


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(RecordError, match="not a run directory"):
        benchbox.load(tmp_path)


def test_two_runs_are_compared_by_their_paths(tmp_path):
    """The third run is the second one with another torch."""
    for name, step_s, day, torch in (
        ("a", 0.2, "2025-12-31", "2.13.0"),
        ("b", 0.22, "2026-01-01", "2.13.0"),
        ("c", 0.22, "2026-01-02", "2.14.0"),
    ):
        records = steady_records(step_s=step_s, started=day)
        write_run(tmp_path / name, *(record | {"environment": record["environment"] | {"torch": torch}} for record in records))
    comparison = benchbox.compare(tmp_path / "a", tmp_path / "b", metrics=["step_time_s"])
    frame = pd.DataFrame(comparison.changes)
    assert frame[["metric", "verdict"]].values.tolist() == [["step_time_s", "regression"]]
    assert frame["ratio"].item() == pytest.approx(1.1, rel=2e-3)
    assert benchbox.compare(tmp_path / "a", tmp_path / "b", metrics="step_time_s") == comparison
    for head, options, verdict in (
        ("b", {"relevant": 0.2}, "neutral"),
        ("c", {}, "incomparable"),
        ("c", {"vary": "torch"}, "regression"),
        ("c", {"vary": "machine, torch"}, "regression"),
    ):
        (change,) = benchbox.compare(tmp_path / "a", tmp_path / head, metrics="step_time_s", **options).changes
        assert change.verdict == verdict, options
    for share in (-1, 2, float("nan"), "2%"):
        with pytest.raises(ConfigurationError, match=r"write 2% as 0\.02"):
            benchbox.compare(tmp_path / "a", tmp_path / "b", relevant=share)


def test_importing_benchbox_is_light_and_its_public_names_are_there():
    program = "import sys, benchbox; print(sorted({name.split('.')[0] for name in sys.modules}), dir(benchbox))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not any(f"'{name}'" in output for name in ("torch", "pandas", "numpy", "pydantic", "typer"))
    assert all(f"'{name}'" in output for name in ("audit_precision", "compare", "load", "observe", "run"))
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        _ = benchbox.lod
