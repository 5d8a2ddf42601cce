"""The gate: expected, found, verdict. A cell that failed or is missing never passes."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from datetime import UTC, datetime

import pytest

from benchbox.analysis.baseline import make_baseline
from benchbox.analysis.gate import gate, verdict_of
from benchbox.analysis.regression import BaselineLookup, judge_regression
from benchbox.analysis.summary import summarize
from benchbox.registry.metrics import metric_by_name
from tests.support.example_baseline import COMPLETE, STEP_S, example_baseline
from tests.support.example_run import CELL, MEASURE, OOM, example_record, example_run, steady_records

NONE = BaselineLookup(None, "promote one")


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
    return BaselineLookup(example_baseline(), None)


def regression_row(records, lookup, metric="step_time_s", allowed=0.05):
    run = {"measure": asdict(MEASURE) | {"launches": len(records)}}
    return rows(records, [{"metric": metric, "max_regression": allowed}], lookup=lookup, **run)[1]


@pytest.mark.parametrize("metric", ["step_time_s", "global_samples_per_s"])
@pytest.mark.parametrize(("factor", "verdict"), [(1.04, "ok"), (1.08, "breach"), (0.5, "ok")])
def test_only_the_worse_direction_is_a_regression(lookup, metric, factor, verdict):
    assert regression_row(steady_records(step_s=STEP_S * factor), lookup, metric).verdict == verdict


@pytest.mark.parametrize(("step_factor", "verdict"), [(1.8, "ok"), (1.96, "ok"), (2.1, "breach")])
def test_the_limit_of_a_throughput_is_the_one_that_is_shown(lookup, step_factor, verdict):
    """Half of the baseline's samples/s is twice its time of a step, not one and a half times."""
    row = regression_row(steady_records(step_s=STEP_S * step_factor), lookup, "global_samples_per_s", allowed=0.5)
    assert row.verdict == verdict
    assert row.expected.startswith(">= ")
    assert f"({1 - 1 / step_factor:.1%} worse, " in row.actual


@pytest.mark.parametrize("step_s", [STEP_S, 2 * STEP_S])
def test_launches_of_which_one_has_no_throughput_settle_nothing(step_s, lookup):
    """It has no logarithm, and medians alone are no test."""
    records = steady_records(step_s=step_s)
    records[0]["throughput"]["global_samples_per_s"] = 0.0
    row = regression_row(records, lookup, "global_samples_per_s")
    assert row.verdict == "inconclusive"
    assert row.note.endswith("one is not above zero")


def test_a_value_that_is_zero_in_every_launch_has_not_become_worse(lookup):
    records = steady_records(step_s=STEP_S)
    for record in records:
        record["throughput"]["global_samples_per_s"] = 0.0
    zero = {"value": 0.0, "low": 0.0, "high": 0.0, "launches": 5, "by_launch": {str(launch): 0.0 for launch in range(1, 6)}}
    lookup.baseline.cells[CELL.cell_id]["values"]["global_samples_per_s"] = zero
    assert regression_row(records, lookup, "global_samples_per_s").verdict == "ok"


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ((1.0, 1.04), "inconclusive"),
        ((1.04, 1.03), "breach"),
        ((1.04,), "inconclusive"),
        ((1.07,), "breach"),
        ((1.0, 1.07), "breach"),
        ((1, 1.02), "ok"),
    ],
)
def test_a_peak_that_chance_raised_in_one_of_several_launches_is_no_breach(factors, verdict, lookup):
    records = steady_records(step_s=STEP_S, launches=len(factors))
    for record, factor in zip(records, factors, strict=True):
        record["memory"]["worst"]["allocated_peak_bytes"] *= factor
    row = regression_row(records, lookup, "peak_allocated_bytes", 0.02)
    assert row.verdict == verdict
    assert (row.note is not None) == (verdict == "inconclusive")


def test_a_regression_is_shown_with_its_interval(lookup):
    row = regression_row(steady_records(step_s=STEP_S * 1.08), lookup)
    assert re.search(r"\(8\.0% worse, \+7\.\d% to \+8\.\d%\)$", row.actual)


def test_launches_that_do_not_settle_a_regression_are_inconclusive(lookup):
    """One launch was disturbed: the median says nothing of it, and the interval does."""
    records = steady_records(step_s=STEP_S * 1.03)
    disturbed = [*records[:4], example_record(launch=5, step_s=STEP_S * 3)]
    row = regression_row(disturbed, lookup)
    assert (row.verdict, verdict_of([row])) == ("inconclusive", "inconclusive")
    assert "launches do not settle whether it is worse" in row.note


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_too_few_launches_are_never_a_verdict_and_the_row_says_how_many_can_be(lookup, factor):
    row = regression_row(steady_records(step_s=STEP_S * factor, launches=2), lookup)
    assert row.verdict == "inconclusive"
    assert row.note == "2 and 5 launches cannot settle it: 5 of the run and of the baseline can"


def test_thousands_of_demands_are_more_than_any_number_of_launches_settles():
    """The exchanges that are sampled have no p so small."""
    run = example_run([CELL], measure=asdict(MEASURE) | {"launches": 30})
    base, subject = (summarize(run, steady_records(step_s=step_s, launches=30)) for step_s in (STEP_S, 2 * STEP_S))
    lookup = BaselineLookup(make_baseline(run, base, "machine"), None)
    judged = judge_regression(subject[0], metric_by_name("step_time_s"), 0.05, lookup, demands=10_000)
    assert judged.verdict == "inconclusive"
    assert judged.note == "no number of launches settles 10000 demands: leave some out (`where`)"


def test_a_baseline_of_an_older_version_has_no_launches_to_compare_with(lookup):
    values = {"step_time_s": {"value": STEP_S, "low": STEP_S, "high": STEP_S, "launches": 2}}
    older = BaselineLookup(replace(lookup.baseline, cells={CELL.cell_id: {"cell": {}, "values": values}}), None)
    row = regression_row(steady_records(step_s=STEP_S), older)
    assert (row.verdict, row.note) == ("missing", "the baseline has no values of launches, as older ones: promote a run again")


def test_peak_memory_has_no_noise_and_is_compared_by_value(lookup):
    """Two launches suffice."""
    records = steady_records(step_s=STEP_S, launches=2)
    assert regression_row(records, lookup, "peak_allocated_bytes").verdict == "ok"
    for record in records:
        record["memory"]["worst"]["allocated_peak_bytes"] *= 2
    assert regression_row(records, lookup, "peak_allocated_bytes").verdict == "breach"


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
    assert (gate_rows[-1].metric, gate_rows[-1].verdict) == ("step_time_s", "missing")


TOO_SLOW = {"metric": "step_time_s", "max": STEP_S / 2}


@pytest.mark.parametrize(
    ("until", "verdict", "run_verdict", "note"),
    [
        ("2999-01-01", "accepted", "ok", "accepted until 2999-01-01: a slower codec"),
        (datetime.now(UTC).date().isoformat(), "accepted", "ok", "a slower codec"),
        ("2020-01-01", "breach", "breach", "it was accepted until 2020-01-01, which has passed: a slower codec"),
    ],
)
def test_a_breach_is_accepted_until_a_day_and_says_so(until, verdict, run_verdict, note):
    gate_rows = rows(COMPLETE, [TOO_SLOW | {"accept": {"reason": "a slower codec", "until": until}}])
    assert (gate_rows[1].verdict, verdict_of(gate_rows)) == (verdict, run_verdict)
    assert note in gate_rows[1].note


def test_a_warning_is_printed_and_fails_nothing_also_without_a_baseline():
    regression = {"metric": "step_time_s", "max_regression": 0.05}
    gate_rows = rows(COMPLETE, [TOO_SLOW | {"severity": "warning"}, regression | {"severity": "warning"}])
    assert verdicts(gate_rows) == [("status", "ok"), ("step_time_s", "warning"), ("step_time_s", "warning")]
    assert verdict_of(gate_rows) == "ok"


def test_a_demand_that_is_met_is_ok_whatever_excuses_it():
    excuse = {"severity": "warning", "accept": {"reason": "r", "until": "2999-01-01"}}
    assert rows(COMPLETE, [{"metric": "step_time_s", "max": STEP_S * 2} | excuse])[1].verdict == "ok"


def test_a_failed_cell_is_never_excused():
    failed = [COMPLETE[0], example_record(launch=2, status="oom", error=OOM)]
    excuse = {"severity": "warning", "accept": {"reason": "r", "until": "2999-01-01"}}
    gate_rows = rows(failed, [{"metric": "status", "expect": expect} | excuse for expect in ("ok", "hang")])
    assert verdicts(gate_rows) == [("status", "breach"), ("status", "breach")]


def test_a_demand_on_the_baseline_is_missing_where_no_launch_has_the_value(lookup):
    row = regression_row(steady_records(step_s=STEP_S), lookup, "mfu")
    assert (row.expected, row.actual, row.verdict) == ("within 5% of the baseline", "no value", "missing")
    assert row.note == "no launch could measure it"
    failed = [example_record(launch=launch, status="oom", error=OOM) for launch in (1, 2)]
    assert regression_row(failed, lookup).note == "no launch ended ok"


def test_a_demand_says_what_it_allows_in_the_unit_of_its_metric(lookup):
    records = steady_records(step_s=STEP_S)
    assert regression_row(records, lookup).expected == "<= 230.2 ms (baseline 219.2 ms + 5%)"
    throughput = regression_row(records, lookup, "global_samples_per_s", allowed=0.025).expected
    assert throughput == ">= 17.79 samples/s (baseline 18.25 samples/s - 2.5%)"
    assert regression_row(records, lookup, "final_loss").expected == "0.3800 .. 0.4200 (baseline 0.4000 +- 5%)"
    demands = [{"metric": "peak_allocated_bytes", "min": 2**20, "max": 2**30}, {"metric": "mfu", "expect": 0.3}]
    assert [row.expected for row in rows(COMPLETE, demands)[1:]] == [">= 1.000 MiB", "<= 1.000 GiB", "= 30.00%"]


def test_a_large_difference_that_one_launch_contradicts_is_no_breach(lookup):
    """The interval reaches below 1: the first launch was faster than all of the baseline."""
    fast, slow = (steady_records(step_s=STEP_S * factor) for factor in (0.95, 1.2))
    row = regression_row([fast[0], *slow[1:]], lookup)
    assert row.verdict == "inconclusive"
    assert "launches do not settle whether it is worse" in row.note


@pytest.mark.parametrize(("other", "verdict"), [("global_samples_per_s", "inconclusive"), ("peak_allocated_bytes", "breach")])
def test_demands_with_noise_share_the_probability_of_a_wrong_breach_and_peaks_take_none_of_it(lookup, other, verdict):
    """Five launches against five have p = 2 / 252, which is enough for one demand and not for two."""
    demands = [{"metric": metric, "max_regression": 0.05} for metric in ("step_time_s", other)]
    measure = asdict(MEASURE) | {"launches": 5}
    row = rows(steady_records(step_s=STEP_S * 1.08), demands, lookup=lookup, measure=measure)[1]
    assert (row.metric, row.verdict) == ("step_time_s", verdict)
    if verdict == "inconclusive":
        assert row.note == "5 and 5 launches cannot settle it: 6 of the run and of the baseline can"


def test_a_value_that_nobody_measured_is_worse_than_a_difference_that_is_not_settled(lookup):
    demands = [{"metric": "step_time_s", "max_regression": 0.05}, {"metric": "mfu", "min": 0.3}]
    gate_rows = rows(steady_records(step_s=STEP_S, launches=2), demands, lookup=lookup)
    assert verdicts(gate_rows)[1:] == [("step_time_s", "inconclusive"), ("mfu", "missing")]
    assert verdict_of(gate_rows) == "missing"


def test_what_is_missing_is_not_accepted_as_a_known_breach_is():
    accept = {"accept": {"reason": "a slower codec", "until": "2999-01-01"}}
    demands = [{"metric": "step_time_s", "max_regression": 0.05} | accept, {"metric": "mfu", "min": 0.3} | accept]
    gate_rows = rows(COMPLETE, demands)
    assert verdicts(gate_rows)[1:] == [("step_time_s", "missing"), ("mfu", "missing")]
    assert verdict_of(gate_rows) == "missing"
