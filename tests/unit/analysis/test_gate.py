"""The gate: expected, found, verdict. A cell that failed or is missing never passes."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from benchbox.analysis.baseline import find_baseline, make_baseline, slug
from benchbox.analysis.gate import BaselineLookup, gate, verdict_of
from benchbox.analysis.summary import summarize
from benchbox.errors import EXIT_THRESHOLD, RecordError, ThresholdError
from benchbox.store.baseline import baseline_path, write_baseline
from tests.support.example_run import CELL, OOM, example_record, example_run

NONE = BaselineLookup(None, "promote one")
COMPLETE = [example_record(launch=1), example_record(launch=2)]
STEP_S = median(median(record["step_time_s"]["slowest"]) for record in COMPLETE)


def rows(records, thresholds, *, cells=(CELL,), lookup=NONE, **changes):
    run = example_run(list(cells), thresholds=thresholds, **changes)
    return gate(run, summarize(run, records), lookup)


def verdicts(gate_rows):
    return [(row.metric, row.verdict) for row in gate_rows]


def passes(gate_rows):
    return all(row.verdict == "ok" for row in gate_rows)


def test_a_complete_run_without_thresholds_passes():
    gate_rows = rows(COMPLETE, [])
    assert verdicts(gate_rows) == [("status", "ok")]
    assert passes(gate_rows)


@pytest.mark.parametrize(
    ("records", "verdict", "actual"),
    [
        ([], "missing", "missing"),
        (COMPLETE[:1], "missing", "ok in 1 of 2 launches"),
        ([COMPLETE[0], example_record(launch=2, status="oom", error=OOM)], "breach", "oom"),
        ([COMPLETE[0], COMPLETE[1] | {"status": "oom", "error": OOM, "unchecked_reason": "no probe"}], "breach", "oom"),
        ([example_record(launch=1, status="interrupted", error=OOM)], "breach", "interrupted"),
    ],
)
@pytest.mark.parametrize("thresholds", [[], [{"metric": "status", "expect": "ok"}], [{"metric": "status", "expect": "oom"}]])
def test_a_failed_or_missing_cell_is_never_green(records, verdict, actual, thresholds):
    result = rows(records, thresholds)
    assert (result[0].verdict, result[0].actual) == (verdict, actual)
    assert not passes(result)


@pytest.mark.parametrize(
    ("demand", "verdict"),
    [
        ({"max": STEP_S * 1.01}, "ok"),
        ({"max": STEP_S}, "ok"),
        ({"max": STEP_S * 0.99}, "breach"),
        ({"min": STEP_S * 0.99}, "ok"),
        ({"min": STEP_S * 1.01}, "breach"),
        ({"expect": STEP_S}, "ok"),
        ({"expect": 1.0}, "breach"),
    ],
)
def test_a_number_is_compared_with_absolute_demands(demand, verdict):
    assert verdicts(rows(COMPLETE, [{"metric": "step_time_s", **demand}]))[1:] == [("step_time_s", verdict)]


def test_two_demands_of_one_threshold_are_two_rows():
    gate_rows = rows(COMPLETE, [{"metric": "step_time_s", "min": 0.01, "max": 0.02}])
    assert verdicts(gate_rows)[1:] == [("step_time_s", "ok"), ("step_time_s", "breach")]


@pytest.mark.parametrize(
    ("records", "thresholds", "verdict"),
    [
        (COMPLETE, [], "ok"),
        (COMPLETE, [{"metric": "step_time_s", "max_regression": 0.05}], "missing"),
        (COMPLETE[:1], [], "missing"),
        (COMPLETE, [{"metric": "step_time_s", "max_regression": 0.05}, {"metric": "step_time_s", "max": 0.0}], "breach"),
    ],
)
def test_a_run_without_a_baseline_is_neither_ok_nor_a_breach(records, thresholds, verdict):
    assert verdict_of(rows(records, thresholds)) == verdict


def test_a_run_without_cells_does_not_pass():
    assert verdict_of([]) == "breach"


def test_a_number_nobody_measured_is_missing():
    gate_rows = rows(COMPLETE, [{"metric": "mfu", "min": 0.3}])
    assert (gate_rows[1].verdict, gate_rows[1].actual, gate_rows[1].note) == (
        "missing",
        "no value",
        "no launch could measure it",
    )


def test_where_selects_cells():
    variant = replace(CELL, backend="zero2")
    records = [*COMPLETE, *(example_record(variant, launch) for launch in (1, 2))]
    gate_rows = rows(records, [{"metric": "step_time_s", "where": {"backend": "zero2"}, "max": 9}], cells=(CELL, variant))
    assert [(row.cell, row.metric) for row in gate_rows] == [
        ("backend=ddp", "status"),
        ("backend=zero2", "status"),
        ("backend=zero2", "step_time_s"),
    ]


def test_a_where_that_matches_nothing_is_a_breach_that_says_so():
    gate_rows = rows(COMPLETE, [{"metric": "step_time_s", "where": {"backend": "zero3"}, "max": 9}])
    assert (gate_rows[1].verdict, gate_rows[1].actual) == ("breach", "matches nothing")
    skipped = [{"cell": replace(CELL, backend="zero3").to_dict(), "reason": "zero3 refuses checkpointing"}]
    gate_rows = rows(COMPLETE, [{"metric": "step_time_s", "where": {"backend": "zero3"}, "max": 9}], skipped=skipped)
    assert gate_rows[1].note == "every cell it selects was skipped: zero3 refuses checkpointing"


@pytest.fixture
def lookup():
    run = example_run([CELL])
    return BaselineLookup(make_baseline(run, summarize(run, COMPLETE), "example"), None)


@pytest.mark.parametrize(
    ("metric", "factor", "verdict"),
    [
        ("step_time_s", 1.04, "ok"),
        ("step_time_s", 1.06, "breach"),
        ("step_time_s", 0.5, "ok"),
        ("global_samples_per_s", 1.04, "ok"),
        ("global_samples_per_s", 1.06, "breach"),
        ("global_samples_per_s", 0.5, "ok"),
    ],
)
def test_only_the_worse_direction_is_a_regression(lookup, metric, factor, verdict):
    slower = [example_record(launch=launch, step_s=0.2 * factor) for launch in (1, 2)]
    gate_rows = rows(slower, [{"metric": metric, "max_regression": 0.05}], lookup=lookup)
    assert gate_rows[1].verdict == verdict


@pytest.mark.parametrize(("loss", "verdict"), [(0.4, "ok"), (0.43, "breach"), (0.37, "breach")])
def test_a_metric_without_a_better_direction_may_move_neither_way(lookup, loss, verdict):
    moved = [record | {"loss": [loss]} for record in COMPLETE]
    gate_rows = rows(moved, [{"metric": "final_loss", "max_regression": 0.05}], lookup=lookup)
    assert gate_rows[1].verdict == verdict


def test_no_baseline_is_red_with_the_remedy():
    gate_rows = rows(COMPLETE, [{"metric": "step_time_s", "max_regression": 0.05}])
    assert (gate_rows[1].verdict, gate_rows[1].note) == ("missing", "promote one")


def test_a_baseline_that_does_not_know_the_cell_is_red(lookup):
    variant = replace(CELL, batch=3)
    records = [example_record(variant, launch) for launch in (1, 2)]
    gate_rows = rows(records, [{"metric": "step_time_s", "max_regression": 0.05}], cells=[variant], lookup=lookup)
    assert gate_rows[1].verdict == "missing"


def test_a_baseline_is_refused_unless_the_run_is_complete():
    run = example_run([CELL])
    for records in ([], COMPLETE[:1], [COMPLETE[0], example_record(launch=2, status="oom", error=OOM)]):
        with pytest.raises(ThresholdError, match="1 of 1 cells are not ok in all 2 launches") as caught:
            make_baseline(run, summarize(run, records), "example")
        assert caught.value.exit_code == EXIT_THRESHOLD


def test_the_baseline_of_this_machine_is_found_and_that_of_another_is_not_compared(tmp_path, lookup):
    run = example_run([CELL])
    missing = find_baseline(run, COMPLETE, tmp_path)
    assert missing.baseline is None
    assert "benchbox baseline promote RUN" in missing.remedy
    path = baseline_path(tmp_path, "example-cpu-2-cores", "example")
    write_baseline(path, lookup.baseline)
    assert find_baseline(run, COMPLETE, tmp_path).baseline == find_baseline(run, COMPLETE, path).baseline == lookup.baseline
    elsewhere = [record | {"environment": {"machine": "Another"}} for record in COMPLETE]
    rejected = find_baseline(run, elsewhere, path)
    assert rejected.baseline is None
    assert "example-cpu-2-cores, and this run on another: not comparable" in rejected.remedy


def test_a_baseline_file_that_was_named_must_exist(tmp_path):
    with pytest.raises(RecordError, match="no such file"):
        find_baseline(example_run([CELL]), COMPLETE, tmp_path / "absent.json")


def test_a_machine_name_is_safe_as_a_folder():
    assert slug("AMD EPYC 9R14 / 2 x H200 (141 GB)") == "amd-epyc-9r14-2-x-h200-141-gb"
    assert slug("../..") == "machine"
