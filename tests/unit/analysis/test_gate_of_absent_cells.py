"""The gate on cells that a baseline has and the run has not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchbox.analysis.baseline import make_baseline
from benchbox.analysis.gate import gate, verdict_of
from benchbox.analysis.regression import BaselineLookup
from benchbox.analysis.summary import summarize
from tests.support.example_run import CELL, example_run, steady_records

if TYPE_CHECKING:
    from benchbox.store.baseline import Baseline

OTHER = replace(CELL, batch=4)


def baseline_of_cells(*cells) -> Baseline:
    run = example_run(list(cells))
    records = [record for cell in cells for record in steady_records(cell, step_s=0.2, launches=2)]
    return make_baseline(run, summarize(run, records), "machine")


def judge_cell(baseline: Baseline, **changes):
    run = example_run([CELL], **changes)
    rows = gate(run, summarize(run, steady_records(step_s=0.2, launches=2)), BaselineLookup(baseline, None))
    return [row for row in rows if row.verdict != "ok"]


def test_a_cell_that_is_skipped_and_was_measured_in_the_baseline_is_a_breach():
    reason = "zero3 refuses it"
    baseline = baseline_of_cells(CELL, OTHER, replace(CELL, batch=8))
    row, removed = judge_cell(baseline, skipped=[{"cell": OTHER.to_dict(), "reason": reason}])
    assert removed.cell == "1 cell of the baseline"
    assert (row.cell_id, row.cell, row.verdict) == (OTHER.cell_id, "batch=4", "breach")
    assert row.note == f"it was measured in the baseline, and is skipped now: {reason}"
    assert judge_cell(baseline_of_cells(CELL), skipped=[{"cell": OTHER.to_dict(), "reason": reason}]) == []


def test_cells_that_were_taken_out_of_the_matrix_are_one_warning_which_fails_nothing():
    (row,) = judge_cell(baseline_of_cells(CELL, OTHER, replace(CELL, batch=8)))
    assert (row.cell_id, row.cell, row.actual, row.verdict) == (None, "2 cells of the baseline", "not in the matrix", "warning")
    assert "such as batch=4: promote a new baseline" in row.note
    assert verdict_of([row]) == "ok"
