"""Two runs with walks: whether the largest batch of each has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.analysis.baseline import make_baseline
from benchbox.analysis.changes import compare_runs
from benchbox.analysis.figures import figures_of_baseline, figures_of_run
from benchbox.analysis.summary import summarize
from benchbox.errors import EXIT_OK, EXIT_THRESHOLD
from benchbox.spec.matrix import BatchSearch
from tests.support.commands import run_in_process
from tests.support.example_run import MEASURE, MIB
from tests.support.walks import Killed, Machine, cameras

LIMITED = replace(MEASURE, memory_limit=200 * MIB)
METRICS = ("peak_allocated_bytes",)


@pytest.fixture
def before(tmp_path) -> Machine:
    return Machine(tmp_path / "before", lambda _: 10, measure=LIMITED, predicted=10, day="2025-12-31")


@pytest.fixture
def today(before, tmp_path) -> Machine:
    return replace(before, folder=tmp_path / "today", day="2026-01-01", launched=[])


def figures(machine: Machine, name: str):
    run = machine.store.run()
    return figures_of_run(name, run, list(machine.store.records()))


def baseline_of(machine: Machine, *, is_older: bool = False):
    run = machine.store.run()
    baseline = make_baseline(run, summarize(run, machine.store.records()), "machine")
    for entry in baseline.cells.values() if is_older else ():
        del entry["walk"]
    return figures_of_baseline("before", baseline)


def changes_of(base, head):
    return [change for change in compare_runs(base, head, metric_names=METRICS).changes if change.metric == "largest batch"]


def compared(before: Machine, today: Machine):
    before.run()
    today.run()
    (change,) = changes_of(figures(before, "before"), figures(today, "today"))
    return change


@pytest.mark.parametrize(("largest", "verdict"), [(2, "regression"), (9, "regression"), (10, "neutral"), (13, "improvement")])
def test_a_largest_batch_is_compared_whatever_batches_were_tried(before, today, largest, verdict):
    """No batch above the start is tried by both, where theory begins elsewhere."""
    today.largest, today.predicted = lambda _: largest, largest
    change = compared(before, today)
    assert (change.base, change.head, change.verdict) == (10, largest, verdict)
    assert change.ratio == largest / 10
    assert change.cell == "backend=ddp"


def test_where_nothing_fits_any_more_the_largest_batch_has_become_smaller(before, today):
    today.largest = lambda _: 0
    change = compared(before, today)
    assert (change.base, change.head, change.verdict) == (10, None, "regression")
    (change,) = changes_of(figures(today, "today"), figures(replace(before), "before"))
    assert (change.verdict, change.ratio) == ("improvement", None)


@pytest.mark.parametrize("is_baseline", [False, True])
@pytest.mark.parametrize(("largest", "verdict"), [(10, "inconclusive"), (4, "regression")])
def test_a_batch_that_the_matrix_lets_no_walk_exceed_is_not_the_largest_that_fits(before, today, largest, verdict, is_baseline):
    today.search, today.largest, today.predicted = BatchSearch(start=2, at_most=6), lambda _: largest, None
    change = compared(before, today)
    assert change.verdict == verdict
    capped = replace(baseline_of(today), started_at=frozenset()) if is_baseline else figures(today, "today")
    (reverse,) = changes_of(capped, figures(before, "before"))
    assert reverse.verdict == ("inconclusive" if largest == 10 else "improvement")
    if largest == 10:
        assert change.reason == "at_most 6 fits in head, and no larger batch was tried"
        assert reverse.reason == "at_most 6 fits in base, and no larger batch was tried"


def test_a_walk_whose_launches_contradict_one_another_is_inconclusive(before, today):
    before.run()
    today.run()
    for record in list(today.store.records()):
        if record["memory"]:
            device_bytes = [190 * MIB, (180 if record["cell"]["batch"] == 2 else 170) * MIB]
            today.store.write_record(record | {"memory": record["memory"] | {"device_bytes": device_bytes}})
    (change,) = changes_of(figures(before, "before"), figures(today, "today"))
    assert change.verdict == "inconclusive"
    assert change.reason == "launches that searched differ in the memory of devices: --fresh measures them again"


def test_batches_of_a_list_are_no_walk(before, today):
    """The largest one that is listed is not the largest that fits."""
    before.run()
    today.run()
    run = replace(before.store.run(), walks=[])
    cells = {cell_id: cell for cell_id, cell in run.cells.items() if cell["batch"] == 2}
    run = replace(run, cells=cells, measure={**run.measure, "launches": 1})
    records = [record for record in before.store.records() if record["cell_id"] in cells]
    base = figures_of_baseline("before", make_baseline(run, summarize(run, records), "machine"))
    assert changes_of(base, figures(today, "today")) == changes_of(figures(today, "today"), base) == []


def test_a_walk_that_has_not_ended_is_inconclusive(before, today):
    before.run()
    today.predicted = None
    with pytest.raises(Killed):
        today.run(at_most_launches=2)
    (change,) = changes_of(figures(before, "before"), figures(today, "today"))
    assert (change.verdict, change.reason) == ("inconclusive", "launches are missing: the same command continues")


def test_batches_under_different_memory_limits_are_not_compared(before, today):
    """Batch 10 fits before, and runs out of memory today."""
    today.measure, today.largest = replace(LIMITED, memory_limit=100 * MIB), lambda _: 9
    before.run()
    today.run()
    changes = compare_runs(figures(before, "before"), figures(today, "today"), metric_names=METRICS).changes
    reason = "memory_limit 100 MiB against memory_limit 200 MiB"
    judged = {(change.metric, change.verdict) for change in changes if change.reason == reason}
    assert judged == {("largest batch", "incomparable"), ("status", "incomparable")}
    assert "regression" not in {change.verdict for change in changes}


def test_batches_on_different_machines_are_not_compared(before, today):
    before.run()
    today.largest = lambda _: 9
    today.run()
    for record in list(today.store.records()):
        today.store.write_record(record | {"environment": (record["environment"] or {}) | {"machine": "another"}})
    comparison = compare_runs(figures(before, "before"), figures(today, "today"), metric_names=METRICS)
    assert {change.verdict for change in comparison.changes} <= {"incomparable", "missing", "neutral"}
    assert {change.metric for change in comparison.changes if change.verdict == "incomparable"} >= {"largest batch", "status"}


@pytest.mark.parametrize("is_older", [False, True])
def test_a_baseline_says_the_largest_batch_of_a_walk(before, today, is_older):
    before.run()
    today.largest = lambda _: 9
    today.run()
    base = baseline_of(before, is_older=is_older)
    (change,) = changes_of(base, figures(today, "today"))
    assert (change.base, change.head, change.verdict) == (10, 9, "regression")
    both = changes_of(base, replace(baseline_of(today, is_older=is_older), started_at=frozenset()))
    assert [change.verdict for change in both] == ([] if is_older else ["regression"]), (
        "an older one does not say what is a walk"
    )


def test_a_batch_that_neither_run_had_to_launch_is_no_missing_figure(before, today):
    """The walk with more cameras does not launch its first batch: that of the other walk shows that it cannot fit."""
    starts = tuple(replace(start, batch=8) for start in cameras(1, 4))
    for machine in (before, today):
        machine.starts, machine.search, machine.largest = starts, BatchSearch(start=8), lambda cell: 6 // cell.cams
        machine.run()
        assert machine.store.record(starts[1].cell_id, 1) is None
    comparison = compare_runs(figures(before, "before"), figures(today, "today"), metric_names=METRICS)
    assert set(comparison.counts) == {"neutral"}


def test_walks_of_one_side_only_are_left_out(before, today):
    today.starts = cameras(1, 4)
    before.run()
    today.run()
    assert [change.cell for change in changes_of(figures(before, "before"), figures(today, "today"))] == ["cams=1"]


def test_compare_ends_with_exit_code_4_where_only_a_largest_batch_has_become_smaller(before, today):
    before.run()
    today.largest, today.predicted = lambda _: 3, 3
    today.run()
    done = run_in_process("compare", before.folder, today.folder)
    assert done.returncode == EXIT_THRESHOLD
    assert "largest batch" in done.stdout
    assert run_in_process("compare", before.folder, before.folder).returncode == EXIT_OK


def status_changes(base, head):
    changes = compare_runs(base, head, metric_names=METRICS).changes
    return [(change.cell, change.base, change.head, change.verdict) for change in changes if change.metric == "status"]


def test_a_batch_that_ran_out_of_memory_in_one_search_need_not_be_tried_in_the_other(before, today):
    """The largest batches are compared. A batch that was repeated, because it was the fastest, is missing in the other."""
    today.predicted = None
    before.run()
    today.run()
    tried = [{cell.batch for cell, _ in machine.launched} for machine in (before, today)]
    beyond, fitting = ({batch for batch in tried[0] ^ tried[1] if (batch > 10) == above} for above in (True, False))
    assert beyond
    assert fitting == {4, 8}
    assert today.fastest == 4
    changes = status_changes(figures(before, "before"), figures(today, "today"))
    assert sorted(changes) == [("batch=11", "oom", "oom", "neutral"), ("batch=4", "missing", "ok", "missing")]


def test_a_batch_that_ran_out_of_memory_in_a_walk_that_the_other_run_has_not_is_missing(before, today):
    before.starts, before.largest = cameras(1, 4), lambda cell: 0 if cell.cams == 4 else 10
    before.run()
    today.run()
    assert ("batch=1 cams=4", "oom", "missing", "missing") in status_changes(figures(before, "before"), figures(today, "today"))
