"""The published runs in `reports/` are complete and consistent."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchbox.analysis.invariants import verify_run
from benchbox.analysis.summary import summarize
from benchbox.store.run import RunStore

REPORTS = Path(__file__).parents[3] / "reports"
RUNS = sorted(path.parent for path in REPORTS.glob("*/run.json"))
REPEATED = sorted(path.parent for path in REPORTS.glob("repeated/*/run.json"))


def test_there_are_published_runs():
    assert {"backends", "fsdp_vs_zero2", "policies", "policies_full", "precision_ab"} <= {run.name for run in RUNS}


@pytest.mark.parametrize("path", [*RUNS, *REPEATED], ids=lambda path: path.name)
def test_a_published_run_has_a_record_of_every_planned_launch_and_violates_nothing(path):
    store = RunStore(path)
    run, records = store.run(), list(store.records())
    assert store.is_packed
    assert all(summary.complete for summary in summarize(run, records))
    assert len(records) == sum(run.planned_launches().values())
    assert verify_run(store).violations == ()


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_published_run_has_its_report_and_tables_and_a_row_in_the_index(path):
    assert {"report.md", "table.csv", "table.parquet", "records.parquet"} <= {file.name for file in path.iterdir()}
    assert f"| `{path.name}/` |" in (REPORTS / "README.md").read_text()
