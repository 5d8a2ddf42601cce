"""The gate on walks: the largest batch and the fastest one against those of a baseline, and what the baseline alone has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchbox.analysis.baseline import make_baseline
from benchbox.analysis.gate import gate, verdict_of
from benchbox.analysis.regression import BaselineLookup
from benchbox.analysis.summary import summarize
from benchbox.errors import EXIT_OK, EXIT_THRESHOLD, RecordError
from benchbox.plan import plan
from benchbox.report.gate.sarif import render_gate_sarif
from benchbox.report.gate.view import GateView
from benchbox.spec import load_matrix
from benchbox.spec.matrix import BatchSearch
from benchbox.store.baseline import Baseline, baseline_path, write_baseline
from tests.support.commands import run_in_process
from tests.support.example_run import CELL, MEASURE, MIB, example_run, steady_records
from tests.support.walks import START, Killed, Machine, cameras

if TYPE_CHECKING:
    from pathlib import Path

LIMITED = replace(MEASURE, memory_limit=200 * MIB)
SHIPPED = load_matrix("matrices/fsdp_vs_zero2.yaml")
FASTEST = {"metric": "global_samples_per_s", "where": {"batch": "fastest"}, "max_regression": 0.25}


@pytest.fixture
def before(tmp_path) -> Machine:
    """The machine of the baseline: batch 20 fits."""
    return Machine(tmp_path / "before", lambda _: 20, measure=LIMITED, predicted=20, fastest=20, day="2025-12-31")


@pytest.fixture
def today(before, tmp_path) -> Machine:
    return replace(before, folder=tmp_path / "today", day="2026-01-01", launched=[])


def baseline_of(machine: Machine) -> Baseline:
    machine.run()
    run = machine.store.run()
    return make_baseline(run, summarize(run, machine.store.records()), "machine")


def judge(machine: Machine, baseline: Baseline | None, **changes):
    """Return the rows of a gate that did not simply pass, and those on largest batches."""
    run = replace(machine.store.run(), **changes)
    rows = gate(run, summarize(run, machine.store.records()), BaselineLookup(baseline, "promote one"))
    return [row for row in rows if row.verdict != "ok" or row.metric == "largest batch"]


def judge_all(machine: Machine, baseline: Baseline, demand: dict[str, object]):
    """Return all rows of a gate with one threshold."""
    run = replace(machine.store.run(), thresholds=[demand])
    return gate(run, summarize(run, machine.store.records()), BaselineLookup(baseline, None))


def test_a_largest_batch_that_has_become_smaller_is_a_breach_whatever_batches_were_tried(before, today):
    """Batch 20 is not launched today: theory begins at 12, and 13 runs out of memory."""
    baseline = baseline_of(before)
    today.largest, today.predicted = lambda _: 12, 12
    today.run()
    assert 20 not in today.batches
    (row,) = judge(today, baseline)
    assert (row.cell, row.metric, row.expected, row.actual) == ("backend=ddp", "largest batch", ">= 20 (baseline)", "12")
    assert (row.verdict, verdict_of([row])) == ("breach", "breach")


@pytest.mark.parametrize("largest", [20, 23])
def test_a_largest_batch_that_is_no_smaller_passes(before, today, largest):
    baseline = baseline_of(before)
    today.largest, today.predicted = lambda _: largest, None
    today.run()
    (row,) = judge(today, baseline)
    assert (row.actual, row.verdict) == (str(largest), "ok")


def test_batches_of_a_list_in_the_baseline_demand_no_largest_batch(before, today):
    """The largest one that was listed is not the largest that fits."""
    baseline = baseline_of(before)
    for entry in baseline.cells.values():
        entry["walk"] = None
    today.largest, today.predicted = lambda _: 12, 12
    today.run()
    assert [row.metric for row in judge(today, baseline)] == []


def test_a_largest_batch_has_a_row_beside_a_baseline_of_the_same_walk_only(before, today):
    baseline = baseline_of(before)
    today.starts = cameras(1, 4)
    today.run()
    assert [(row.cell, row.verdict) for row in judge(today, baseline)] == [("cams=1", "ok")]
    assert judge(today, None) == []


def test_the_largest_batch_of_a_walk_that_has_not_ended_is_missing(before, today):
    baseline = baseline_of(before)
    today.predicted = None
    with pytest.raises(Killed):
        today.run(at_most_launches=3)
    (row,) = (row for row in judge(today, baseline) if row.metric == "largest batch")
    assert (row.actual, row.verdict) == ("8 so far", "missing")
    assert row.note == "launches are missing: the same command continues"


def test_where_nothing_fits_any_more_the_largest_batch_is_none(before, today):
    baseline = baseline_of(before)
    today.largest = lambda _: 0
    today.run()
    (row,) = (row for row in judge(today, baseline) if row.metric == "largest batch")
    assert (row.actual, row.verdict, row.note) == ("none", "breach", "not even batch 1 fits")


@pytest.mark.parametrize(("largest", "verdict"), [(20, "ok"), (9, "breach")])
def test_no_larger_batch_is_demanded_than_the_matrix_lets_the_walk_try(before, today, largest, verdict):
    baseline = baseline_of(before)
    today.search, today.largest, today.predicted = BatchSearch(start=2, at_most=12), lambda _: largest, None
    today.run()
    (row,) = judge(today, baseline)
    assert (row.expected, row.verdict) == (">= 12 (at_most; baseline 20)", verdict)


def test_largest_batches_under_different_memory_limits_are_not_compared_and_the_row_says_so(before, today):
    baseline = baseline_of(before)
    today.measure, today.largest, today.predicted = replace(LIMITED, memory_limit=100 * MIB), lambda _: 12, 12
    today.run()
    (row,) = judge(today, baseline)
    assert (row.verdict, verdict_of([row])) == ("warning", "ok")
    assert row.note.startswith("not compared: memory_limit 100 MiB against memory_limit 200 MiB of the baseline")
    (row,) = (row for row in judge(today, baseline, thresholds=[FASTEST]) if row.metric == "global_samples_per_s")
    assert (row.verdict, row.note.startswith("memory_limit 100 MiB against")) == ("missing", True)


def test_a_walk_of_a_baseline_that_lacks_later_fields_of_cells_is_the_same_walk(before, today):
    baseline = baseline_of(before)
    for entry in baseline.cells.values():
        del entry["cell"]["compile"]
    today.run()
    (row,) = judge(today, baseline)
    assert row.verdict == "ok"


def test_the_rule_of_a_largest_batch_in_sarif_says_what_it_is(before, today):
    baseline = baseline_of(before)
    today.run()
    log = json.loads(render_gate_sarif(GateView(path="run", rows=judge(today, baseline))))
    (rule,) = log["runs"][0]["tool"]["driver"]["rules"]
    assert rule["fullDescription"]["text"] == "largest batch of a walk that fits in memory"


def test_a_walk_that_is_pruned_and_was_measured_in_the_baseline_is_a_breach(before, today):
    before.starts = today.starts = cameras(1, 4)
    baseline = baseline_of(before)
    today.largest = lambda _: 0
    today.run()
    rows = judge(today, baseline)
    assert "not in the matrix" not in {row.actual for row in rows}, "all its batches are of the skipped walk"
    (row,) = (row for row in rows if row.actual == "skipped")
    assert (row.cell, row.metric, row.expected, row.verdict) == ("cams=4", "status", "ok (baseline)", "breach")
    assert row.note.startswith("it was measured in the baseline, and is skipped now: pruned: launch 1 of ")


@pytest.mark.parametrize("excuse", [{"severity": "warning"}, {"accept": {"reason": "known", "until": "9999-12-31"}}])
def test_no_threshold_excuses_a_smaller_largest_batch_or_a_skipped_cell_and_a_new_baseline_does(before, today, excuse):
    baseline = baseline_of(before)
    today.largest, today.predicted = lambda _: 12, 12
    today.run()
    skipped = replace(CELL, backend="fsdp2")
    entry = next(iter(baseline.cells.values()))
    cells = {**baseline.cells, skipped.cell_id: {**entry, "cell": skipped.to_dict()}}
    thresholds = [{"metric": "status", "expect": "ok", **excuse}, {"metric": "step_time_s", "max": 1e-9, **excuse}]
    changes = {"thresholds": thresholds, "skipped": [{"cell": skipped.to_dict(), "reason": "no memory"}]}
    rows = judge(today, replace(baseline, cells=cells), **changes)
    assert {row.verdict for row in rows if row.metric == "step_time_s"} == {"warning" if "severity" in excuse else "accepted"}
    assert [(row.metric, row.verdict) for row in rows if row.metric != "step_time_s"] == [
        ("largest batch", "breach"),
        ("status", "breach"),
    ]
    promoted = baseline_of(today)
    assert [row.verdict for row in judge(today, replace(promoted, started_at=()), skipped=changes["skipped"])] == ["ok"]


def test_batches_that_a_walk_does_not_try_again_are_not_absent(before, today):
    baseline = baseline_of(before)
    today.largest, today.predicted = lambda _: 23, 23
    today.run()
    assert 20 not in today.batches
    assert [row.metric for row in judge(today, baseline)] == ["largest batch"]


def shipped_machine(folder: Path, launches: int, **changes) -> Machine:
    """Return a machine that runs the walks of the shipped matrix; its thresholds are given to `judge`."""
    measure = replace(SHIPPED.measure, launches=launches)
    return Machine(folder, lambda _: 9, plan(SHIPPED).walks, measure, search=SHIPPED.search, predicted=9, fastest=9, **changes)


def judge_shipped(machine: Machine, baseline: Baseline):
    machine.run()
    thresholds = [threshold.to_dict() for threshold in SHIPPED.thresholds]
    return [row for row in judge(machine, baseline, thresholds=thresholds) if row.metric != "largest batch"]


@pytest.fixture(scope="module")
def shipped_baseline(tmp_path_factory) -> Baseline:
    return baseline_of(shipped_machine(tmp_path_factory.mktemp("before"), launches=7))


def test_walks_that_are_slower_at_their_fastest_batch_are_a_breach_of_the_shipped_matrix(tmp_path, shipped_baseline):
    """Theory begins at another batch: the fastest one is another one too."""
    machine = shipped_machine(tmp_path, launches=7, slowdown=1.4)
    machine.largest, machine.predicted, machine.fastest = lambda _: 8, 8, 8
    rows = judge_shipped(machine, shipped_baseline)
    assert [(row.metric, row.verdict) for row in rows] == [("global_samples_per_s", "breach")] * 4
    assert all("batch=8" in row.cell for row in rows)
    assert "samples/s at batch 9 - 25%)" in rows[0].expected
    assert "% worse, " in rows[0].actual
    assert judge_shipped(shipped_machine(tmp_path / "equal", launches=7), shipped_baseline) == []


@pytest.mark.parametrize(("launches", "judged"), [(1, 0), (6, 5)])
def test_too_few_launches_of_the_fastest_batch_are_inconclusive_and_say_how_many_settle_it(
    tmp_path, shipped_baseline, launches, judged
):
    rows = judge_shipped(shipped_machine(tmp_path, launches, slowdown=1.4), shipped_baseline)
    assert [(row.metric, row.verdict) for row in rows] == [("global_samples_per_s", "inconclusive")] * 4
    expected = (
        f"{judged} and 6 launches after the one that chose the batch cannot settle it: "
        "6 can, `--launches 7` of the run and of the baseline"
    )
    assert {row.note for row in rows} == {expected}


def test_a_baseline_of_one_launch_of_every_batch_settles_nothing(tmp_path):
    baseline = baseline_of(shipped_machine(tmp_path / "before", launches=1))
    rows = judge_shipped(shipped_machine(tmp_path, launches=7), baseline)
    assert {(row.verdict, row.note.split(" after")[0]) for row in rows} == {("inconclusive", "6 and 0 launches")}


def test_the_launch_that_chose_the_fastest_batch_is_not_judged(before, today):
    """It was fast by chance, in the baseline by a factor of three."""
    before.measure = today.measure = replace(LIMITED, launches=6)
    before.run()
    faster_search(before, 20)
    today.run()
    (row,) = (row for row in judge_all(today, baseline_of(before), FASTEST) if row.metric == "global_samples_per_s")
    assert (row.verdict, "(0.0% worse, " in row.actual) == ("ok", True), row.actual


def _without_launches(baseline: Baseline) -> Baseline:
    for entry in baseline.cells.values():
        del entry["values"]["global_samples_per_s"]["by_launch"]
    return baseline


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda _: None, "promote one"),
        (lambda baseline: replace(baseline, cells={}), "the baseline does not have it: promote a run of today's matrix"),
        (_without_launches, "the baseline has no values of launches, as older ones: promote a run again"),
    ],
)
def test_a_fastest_batch_without_one_to_compare_with_is_missing(before, today, change, note):
    baseline = change(baseline_of(before))
    today.run()
    (row,) = (row for row in judge(today, baseline, thresholds=[FASTEST]) if row.metric == "global_samples_per_s")
    assert (row.verdict, row.note) == ("missing", note)


def test_the_fastest_batch_of_a_walk_that_has_not_ended_is_missing(today):
    with pytest.raises(Killed):
        today.run(at_most_launches=1)
    (row,) = (row for row in judge(today, None, thresholds=[FASTEST]) if row.metric == "global_samples_per_s")
    assert (row.actual, row.verdict, row.note) == (
        "unfinished",
        "missing",
        "launches are missing: the same command continues",
    )


def test_a_limit_on_the_fastest_batch_is_judged_on_the_launches_that_did_not_choose_it(today):
    today.measure = replace(LIMITED, launches=2)
    today.run()
    cell_id = today.store.run().walks[0]["fastest"]
    second = today.store.record(cell_id, 2)["throughput"]["global_samples_per_s"]
    demand = {"metric": "global_samples_per_s", "where": {"batch": "fastest"}, "expect": second}
    assert judge(today, None, thresholds=[demand]) == []


def test_fastest_selects_no_cell_that_is_in_no_walk():
    run = example_run([CELL], thresholds=[FASTEST])
    rows = gate(run, summarize(run, steady_records(step_s=0.2, launches=2)), BaselineLookup(None, None))
    assert [(row.verdict, row.note) for row in rows[1:]] == [("breach", "batch: fastest selects walks, and this run has none")]


def test_check_looks_for_the_baseline_of_a_run_with_walks_that_demands_no_comparison(before, today, tmp_path):
    baseline = baseline_of(before)
    today.largest, today.predicted = lambda _: 12, 12
    today.run()
    alone = run_in_process("check", today.folder, "--baseline", tmp_path)
    assert alone.returncode == EXIT_OK, alone.stderr
    assert "largest batches are not compared: no baseline " in " ".join(alone.stdout.split())
    write_baseline(baseline_path(tmp_path, "example-cpu-2-cores", "example"), baseline)
    compared = run_in_process("check", today.folder, "--baseline", tmp_path)
    assert compared.returncode == EXIT_THRESHOLD
    assert ">= 20 (baseline)" in compared.stdout
    assert "noise floor" not in compared.stdout


def test_a_baseline_with_a_malformed_cell_is_refused_with_its_id(before, today):
    baseline = baseline_of(before)
    today.run()
    damaged = replace(baseline, cells={"0123": {"cell": {"batch": 2}, "values": {}}})
    with pytest.raises(RecordError, match="the baseline of example has a malformed cell, 0123 "):
        judge(today, damaged)


def test_a_demand_on_a_batch_that_is_not_repeated_says_which_one_is(before, today):
    """Batch 2 is launched once by every run, so that more launches of the run are no remedy."""
    before.measure = today.measure = replace(LIMITED, launches=7)
    baseline = baseline_of(before)
    today.run()
    demand = {"metric": "global_samples_per_s", "where": {}, "max_regression": 0.25}
    rows = [row for row in judge(today, baseline, thresholds=[demand]) if row.metric == "global_samples_per_s"]
    assert {(row.cell, row.verdict) for row in rows} == {("batch=2", "inconclusive")}
    assert {row.note for row in rows} == {
        "launches repeat the fastest batch of a walk only, 20: `where: {batch: fastest}` judges it"
    }


@pytest.mark.parametrize("launches", [1, 2])
def test_a_demand_on_the_batch_that_is_repeated_says_how_many_launches_settle_it(before, today, launches):
    before.measure = today.measure = replace(LIMITED, launches=launches)
    baseline = baseline_of(before)
    today.run()
    demand = {"metric": "global_samples_per_s", "where": {"batch": 20}, "max_regression": 0.25}
    (row,) = (row for row in judge(today, baseline, thresholds=[demand]) if row.metric == "global_samples_per_s")
    assert row.note == (
        f"{launches - 1} and {launches - 1} launches after the one that chose the batch cannot settle it: "
        "5 can, `--launches 6` of the run and of the baseline"
    )


def faster_search(machine: Machine, batch: int) -> None:
    """Make the launch that searched at a batch three times as fast, which chance might."""
    record = machine.store.record(replace(START, batch=batch).cell_id, 1)
    record["throughput"]["global_samples_per_s"] *= 3
    machine.store.write_record(record)


@pytest.mark.parametrize("is_older", [False, True], ids=["baseline", "older-baseline"])
@pytest.mark.parametrize("side", ["before", "today"])
def test_the_launch_that_searched_is_not_judged_where_a_demand_names_the_batch(before, today, side, is_older):
    before.measure = today.measure = replace(LIMITED, launches=6)
    before.run()
    today.run()
    faster_search({"before": before, "today": today}[side], 20)
    demand = {"metric": "global_samples_per_s", "where": {"batch": 20}, "max_regression": 0.25}
    baseline = baseline_of(before)
    for entry in baseline.cells.values() if is_older else ():
        del entry["walk"]
    (row,) = (row for row in judge_all(today, baseline, demand) if row.metric == "global_samples_per_s")
    assert (row.verdict, "(0.0% worse, " in row.actual) == ("ok", True), row.actual


def test_a_limit_on_a_batch_that_is_named_is_judged_on_the_launches_that_did_not_choose_it(today):
    today.measure = replace(LIMITED, launches=2)
    today.run()
    faster_search(today, 20)
    second = today.store.record(replace(START, batch=20).cell_id, 2)["throughput"]["global_samples_per_s"]
    demand = {"metric": "global_samples_per_s", "where": {"batch": 20}, "expect": second}
    assert judge(today, None, thresholds=[demand]) == []


@pytest.mark.parametrize("batch", [20, "fastest"])
@pytest.mark.parametrize("sides", [("today",), ("before", "today")])
def test_a_peak_of_a_batch_of_a_walk_is_that_of_all_launches(before, today, batch, sides):
    """The launch that searched had the highest one: chance does not choose peaks."""
    before.measure = today.measure = replace(LIMITED, launches=2)
    before.run()
    today.run()
    for side in sides:
        store = {"before": before, "today": today}[side].store
        record = store.record(replace(START, batch=20).cell_id, 1)
        record["memory"]["worst"]["allocated_peak_bytes"] *= 2
        store.write_record(record)
    demand = {"metric": "peak_allocated_bytes", "where": {"batch": batch}, "max_regression": 0.05}
    (row,) = (row for row in judge_all(today, baseline_of(before), demand) if row.metric == "peak_allocated_bytes")
    assert row.verdict == ("ok" if "before" in sides else "breach"), row


def test_a_cell_that_was_a_batch_of_a_walk_in_the_baseline_only_is_judged_without_the_launch_that_searched_there(before):
    before.measure = replace(LIMITED, launches=6)
    before.run()
    faster_search(before, 20)
    cell = replace(START, batch=20)
    demand = {"metric": "global_samples_per_s", "where": {}, "max_regression": 0.25}
    run = example_run([cell], thresholds=[demand], measure=before.store.run().measure | {"launches": 5})
    records = [before.store.record(cell.cell_id, launch) | {"launch": launch - 1} for launch in range(2, 7)]
    rows = gate(run, summarize(run, records), BaselineLookup(baseline_of(before), None))
    (row,) = (row for row in rows if row.metric == "global_samples_per_s")
    assert (row.verdict, "(0.0% worse, " in row.actual) == ("ok", True), row
