"""The published runs in `reports/` are complete and consistent."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from benchbox.analysis.invariants import verify_run
from benchbox.analysis.summary import summarize
from benchbox.report.printed_tables import REPORT_INVARIANTS
from benchbox.spec.load import load_matrix
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, example_record, example_run
from tests.support.scripts import load_script

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
    assert verify_run(store, REPORT_INVARIANTS).violations == ()


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_published_run_has_its_report_and_tables_and_a_row_in_the_index(path):
    assert {"report.md", "table.csv", "table.parquet", "records.parquet"} <= {file.name for file in path.iterdir()}
    assert f"| `{path.name}/` |" in (REPORTS / "README.md").read_text()


def test_the_verdicts_of_the_repeated_runs_are_those_of_their_records(capsys):
    load_script(REPORTS / "repeated" / "verdicts.py").main(REPEATED)
    assert capsys.readouterr().out == (REPORTS / "repeated" / "verdicts.md").read_text()


@pytest.fixture
def measure():
    """The script of `make published`."""
    return load_script(REPORTS / "measure.py")


def test_one_command_measures_every_published_run_as_it_was_measured(measure):
    published = {REPORTS / folder: measurement for measurement in measure.MEASUREMENTS for folder in measurement.folders}
    assert published.keys() == {*RUNS, *REPEATED}
    for path, measurement in published.items():
        run, options = RunStore(path).run(), dict(zip(measurement.options[::2], measurement.options[1::2], strict=True))
        assert measurement.matrix == run.matrix_file
        launches = int(options.pop("--launches", load_matrix(REPORTS.parent / measurement.matrix).measure.launches))
        assert (launches, options) == (run.measure["launches"], {}), path.name


def test_studies_are_measured_by_the_commands_that_their_matrices_state(measure):
    stated = {
        line.removeprefix("#").strip()
        for matrix in (REPORTS / "noise").glob("*.yaml")
        for line in matrix.read_text().splitlines()
        if "benchbox" in line
    }
    commands = set()
    for measurement in measure.MEASUREMENTS:
        if not measurement.folders:
            out = f"--out runs/{measurement.name}"
            commands.add(f"benchbox {measurement.verb} {measurement.matrix} {shlex.join(measurement.options)} {out}")
    assert commands == stated


def test_a_run_that_is_not_published_is_no_run_to_measure(measure, capsys):
    assert measure.main(["backend"]) == 2
    assert capsys.readouterr().err.startswith("no such run: backend; there are repeated/1, ")


def test_launches_of_another_commit_or_of_changed_sources_are_not_published(measure, tmp_path):
    """They may lie in `runs/` from before: `benchbox run` repeats them only if its own sources have changed."""
    store = RunStore(tmp_path)
    store.write_run(example_run([CELL]))
    commits = [{"commit": "a", "dirty": False}, {"commit": "b", "dirty": False}, {"commit": "a", "dirty": True}, None]
    for launch, git in enumerate(commits, 1):
        record = example_record(CELL, launch)
        store.write_record(record | {"environment": record["environment"] | {"git": git}})
    assert measure.other_launches(tmp_path, "a") == [f"launch {launch} of {CELL.cell_id}" for launch in (2, 3)]
