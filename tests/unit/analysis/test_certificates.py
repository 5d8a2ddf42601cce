from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchbox.analysis.baseline import make_baseline
from benchbox.analysis.certificates import certificates, mean_probes
from benchbox.analysis.gate import gate
from benchbox.analysis.invariants import verify_run
from benchbox.analysis.regression import BaselineLookup
from benchbox.analysis.summary import summarize
from benchbox.errors import ThresholdError
from benchbox.report.html import render_html
from benchbox.report.view import build_report
from benchbox.spec.matrix import BatchSearch
from tests.support.example_run import MEASURE, MIB, OOM, example_record
from tests.support.walks import START, Killed, Machine, cameras

LIMITED = replace(MEASURE, memory_limit=200 * MIB)
BACKENDS = (replace(START, backend="fsdp1_full"), replace(START, backend="zero2"))


def results(machine: Machine):
    run = machine.store.run()
    return certificates(run, summarize(run, machine.store.records()))


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path, lambda _: 6, measure=LIMITED, predicted=5, fastest=5)


def test_a_certificate_names_both_batches_the_peak_and_what_ran_out_of_memory(machine):
    machine.run()
    (result,) = results(machine)
    assert result.is_complete
    assert (result.largest.cell["batch"], result.beyond.cell["batch"], result.predicted_batch) == (6, 7, 5)
    assert (result.limit_bytes, result.peak_bytes, result.headroom_bytes) == (200 * MIB, 160 * MIB, 40 * MIB)
    error = result.error
    assert (error["rank"], error["phase"], error["operation"]) == (1, "backward", "aten.mm.default")
    assert (result.allocation_retries, result.probes, result.launches) == (None, 4, 5)
    assert "no allocator retries" in result.retries_reason
    assert mean_probes([result]) == 4


def test_walks_that_were_not_launched_do_not_count_in_the_mean_of_their_launches(tmp_path):
    starts = cameras(1, 4)
    machine = Machine(tmp_path, lambda _: 6, starts, LIMITED, predicted=5, fastest=5, only=starts[:1])
    machine.run()
    both = results(machine)
    assert [result.probes for result in both] == [4, 0]
    assert mean_probes(both) == 4
    assert mean_probes(both[1:]) is None
    summary = build_report(machine.store.run(), list(machine.store.records())).walks.summary
    assert "Those that ended took 4.00 launches each on average" in summary


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_a_star_that_is_not_at_the_highest_rate_is_explained(machine, factor):
    """Repeats of the batch that was fastest in the search were slower than another one."""
    machine = replace(machine, measure=replace(machine.measure, launches=4))
    machine.run()
    (result,) = results(machine)
    for number in range(2, 5):
        record = machine.store.record(result.fastest.cell_id, number)
        record["throughput"]["global_samples_per_s"] *= factor
        machine.store.write_record(record)
    notes = build_report(machine.store.run(), list(machine.store.records())).walks.notes
    assert any(note.startswith("Rates are medians of launches. A star marks") for note in notes) == (factor < 1)


def test_the_peak_of_the_throughput_is_often_not_the_largest_batch(machine):
    machine.run()
    (result,) = results(machine)
    assert result.fastest.cell["batch"] == 5
    assert [summary.cell["batch"] for summary in result.batches] == [2, 5, 6, 7]


def test_on_a_gpu_the_device_is_the_limit_and_retries_are_counted(machine):
    machine.run()
    run, records = machine.store.run(), list(machine.store.records())
    for record in records:
        if record["memory"]:
            worst = record["memory"]["worst"] | {"reserved_peak_bytes": 170 * MIB}
            counted = {"device_bytes": [190 * MIB, 180 * MIB], "allocation_retries": [0, 3], "source": "torch.cuda"}
            record["memory"] |= {"worst": worst, **counted}
        record["memory_limit_bytes"] = None
    (result,) = certificates(run, summarize(run, records))
    assert (result.limit_bytes, result.headroom_bytes, result.allocation_retries) == (180 * MIB, 10 * MIB, 3)
    assert result.retries_reason is None


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({"largest": lambda _: 0}, "nothing fits", "not even batch 1 fits"),
        ({"search": BatchSearch(start=2, at_most=5)}, "capped", "at_most 5 fits, and no larger batch is tried"),
        ({"failures": {5: "crash"}}, "failed", "batch 5 ended crash"),
    ],
    ids=["nothing fits", "capped", "failed"],
)
def test_a_walk_without_certificate_says_why(machine, changes, outcome, reason):
    machine = replace(machine, **changes)
    machine.run()
    (result,) = results(machine)
    assert (result.outcome, result.is_complete) == (outcome, False)
    assert result.reason.startswith(reason)


def test_a_walk_in_progress_has_no_certificate(machine):
    with pytest.raises(Killed):
        machine.run(at_most_launches=2)
    (result,) = results(machine)
    assert (result.outcome, result.largest.cell["batch"]) == ("unfinished", 5)


@pytest.mark.parametrize("key", ["machine", "torch", "device_bytes"])
def test_a_walk_whose_search_went_on_with_other_memory_has_no_certificate(machine, key):
    """A job that was cut off may be submitted again, and run on a node with other devices."""
    machine.run()
    run, records = machine.store.run(), list(machine.store.records())
    for record in records:
        elsewhere = record["cell"]["batch"] > 5
        if key == "device_bytes" and record["memory"]:
            record["memory"] = record["memory"] | {"device_bytes": [190 * MIB, 180 * MIB + elsewhere]}
        elif key != "device_bytes" and elsewhere:
            record["environment"] = (record["environment"] or {}) | {key: "another"}
    (result,) = certificates(run, summarize(run, records))
    assert (result.outcome, result.is_complete) == ("contradictory", False)
    name = "the memory of devices" if key == "device_bytes" else key
    assert result.reason == f"launches that searched differ in {name}: --fresh measures them again"
    summaries = summarize(run, records)
    (row,) = (row for row in gate(run, summaries, BaselineLookup(None, None)) if row.verdict != "ok")
    assert (row.metric, row.actual, row.verdict, row.note) == ("largest batch", "6", "missing", result.reason)
    with pytest.raises(ThresholdError, match="differ in"):
        make_baseline(run, summaries, "machine")


def test_the_gate_and_a_baseline_take_no_walk_that_has_not_ended_for_a_result(machine):
    """Every batch that was tried has its launches, and is ok: a budget ended between two rounds."""
    with pytest.raises(Killed):
        machine.run(at_most_launches=2)
    run = machine.store.run()
    tried = [cell_id for cell_id in run.cells if machine.store.record(cell_id, 1)]
    run = replace(run, cells={cell_id: run.cells[cell_id] for cell_id in tried}, walks=[{**run.walks[0], "cells": tried}])
    summaries = summarize(run, machine.store.records())
    assert all(summary.complete for summary in summaries)
    (row,) = (row for row in gate(run, summaries, BaselineLookup(None, None)) if row.verdict != "ok")
    assert (row.metric, row.expected, row.actual, row.verdict) == (
        "largest batch",
        "a walk that has ended",
        "5 so far",
        "missing",
    )
    assert row.note == "launches are missing: the same command continues"
    with pytest.raises(ThresholdError, match="walks that show their largest batch: backend=ddp: launches are missing"):
        make_baseline(run, summaries, "machine")


def test_the_gate_judges_the_batches_that_fit(machine):
    machine.run()
    run = machine.store.run()
    rows = gate(run, summarize(run, machine.store.records()), BaselineLookup(None, "no baseline"))
    assert {row.verdict for row in rows} == {"ok"}
    assert len({row.cell_id for row in rows}) == 3


def test_the_gate_breaches_where_nothing_fits(machine):
    replace(machine, largest=lambda _: 0).run()
    run = machine.store.run()
    rows = gate(run, summarize(run, machine.store.records()), BaselineLookup(None, "no baseline"))
    assert {row.verdict for row in rows} == {"breach"}


def test_a_batch_that_need_not_run_is_counted_as_beyond_memory_only(tmp_path):
    """The walk with more cameras does not launch its first batch: that of the other walk shows that it cannot fit."""
    starts = tuple(replace(start, batch=8) for start in cameras(1, 4))
    machine = Machine(tmp_path, lambda cell: 6 // cell.cams, starts, LIMITED, BatchSearch(start=8))
    machine.run()
    assert machine.store.record(starts[1].cell_id, 1) is None
    counts = dict(build_report(machine.store.run(), machine.store.records()).counts)
    assert counts == {"cells": 8, "ok": 3, "beyond memory": 5}


def test_a_report_shows_certificates_and_no_failure(tmp_path):
    machine = Machine(tmp_path, lambda cell: 8 // cell.cams, cameras(1, 4), LIMITED, predicted=8, fastest=2)
    machine.run()
    report = build_report(machine.store.run(), list(machine.store.records()))
    assert report.failures == ()
    assert dict(report.counts)["beyond memory"] >= 2
    assert "failed" not in dict(report.counts)
    assert "2 of 2 walks have a certificate" in report.walks.summary
    rows = [view.texts for view in report.walks.certificates]
    assert [row[:3] for row in rows] == [("cams=1", "8", "8"), ("cams=4", "2", "8")]
    assert rows[0][3:5] == ("160 MiB", "40.0 MiB")
    assert rows[0][5] == "9 (rank 1, backward, aten.mm.default)"
    assert "2: " in rows[0][7]
    assert rows[0][7].count("*") == 1
    commands = {card.command for card in report.cards}
    assert commands == {f"benchbox run matrices/example.yaml --only cams={cams}" for cams in (1, 4)}, "they select walks"
    page = render_html(report).partition('id="walks"')[2]
    headers = re.findall(r'<th scope="col">(.*?)</th>', page)[: len(report.walks.headers)]
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", page.partition("<tbody>")[2], re.DOTALL)[: len(headers)]
    shown = dict(zip(headers, cells, strict=True))
    assert [shown[name] for name in ("predicted", "peak", "headroom")] == ["8", "160 MiB", "40.0 MiB"]


def test_verify_reports_a_batch_that_fits_above_one_that_does_not(machine):
    machine.run()
    store = machine.store
    record = store.record(replace(START, batch=2).cell_id, 1)
    record |= {"status": "oom", "error": {"type": "E", "message": "", "rank": 0, "phase": None, "traceback": None}}
    record |= {"throughput": None}
    store.write_record(record)
    assert results(machine)[0].outcome == "contradictory"
    messages = [str(violation) for violation in verify_run(store).violations]
    assert any(
        "no batch of a walk fits above one that does not: batch 5 fits, and batch 2 ran out" in text for text in messages
    )


def test_verify_reports_a_certificate_that_lacks_a_launch(machine):
    machine.run()
    store = machine.store
    store.remove_record(replace(START, batch=7).cell_id, 1)
    messages = [str(violation) for violation in verify_run(store).violations]
    assert any("ended, and its launches do not show it: launches are missing" in text for text in messages)


def test_a_walk_of_which_no_batch_fits_has_no_memory_and_no_retries(machine):
    replace(machine, largest=lambda _: 0).run()
    (result,) = results(machine)
    assert (result.limit_bytes, result.peak_bytes, result.headroom_bytes, result.fastest) == (None, None, None, None)
    assert (result.allocation_retries, result.retries_reason) == (None, "no batch fits")
    assert result.beyond.cell["batch"] == 1


def test_a_walk_that_another_one_prunes_after_launches_of_its_own_names_the_launch_that_shows_it(tmp_path):
    """With 4 cameras batch 2 ran out of memory; then batch 1 did with one camera."""
    machine = Machine(tmp_path, lambda _: 0, cameras(4), LIMITED)
    with pytest.raises(Killed):
        machine.run(at_most_launches=1)
    machine.starts = cameras(4, 1)
    machine.run()
    assert [(cell.cams, cell.batch) for cell, _ in machine.launched] == [(4, 2), (1, 2), (1, 1)]
    pruned, shown = results(machine)
    assert (pruned.outcome, pruned.beyond.cell["batch"], shown.outcome) == ("pruned", 2, "nothing fits")
    assert pruned.reason.startswith(f"pruned: launch 1 of {replace(START, batch=1).cell_id} (cams=1, checkpointing=no) ran out")


def test_a_batch_that_ran_out_of_memory_below_one_that_fits_is_a_failure(machine):
    machine.run()
    store = machine.store
    record = store.record(replace(START, batch=2).cell_id, 1)
    store.write_record(record | {"status": "oom", "error": OOM, "throughput": None})
    beyond = {summary.cell["batch"]: summary.beyond_memory for summary in summarize(store.run(), store.records())}
    assert beyond == {2: False, 5: False, 6: False, 7: True}


def fail_repeats(machine, batch, statuses):
    """Replace the repeats of a batch, from launch 2 on, by launches that ended so."""
    cell = replace(START, batch=batch)
    for number, status in enumerate(statuses, 2):
        error = OOM if status == "oom" else OOM | {"type": "RuntimeError", "phase": None}
        machine.store.write_record(example_record(cell, number, status=status, error=error))


@pytest.mark.parametrize(("fastest", "largest"), [(6, "5"), (5, "2"), (2, "-")])
def test_a_batch_of_which_a_repeat_ran_out_of_memory_does_not_fit_and_no_larger_one_does(machine, fastest, largest):
    replace(machine, fastest=fastest, measure=replace(LIMITED, launches=4)).run()
    assert results(machine)[0].is_complete
    fail_repeats(machine, fastest, ["oom", "oom"])
    (result,) = results(machine)
    assert (result.outcome, result.search, result.is_complete) == ("contradictory", "complete", False)
    assert result.reason == f"batch {fastest} ran out of memory in 2 of 4 launches"
    assert result.fastest.cell["batch"] == fastest, "the search chose it"
    report = build_report(machine.store.run(), machine.store.records()).walks
    (row,) = [view.texts for view in report.certificates]
    assert row[1] == f"{largest} ({result.reason})"
    assert row[5] == f"{fastest} (rank 1, backward, operation unknown)"
    assert report.summary.startswith("0 of 1 walks have a certificate")


def test_a_repeat_that_failed_for_another_reason_than_memory_leaves_the_certificate_as_it_is(machine):
    replace(machine, fastest=6, measure=replace(LIMITED, launches=3)).run()
    before = results(machine)[0]
    fail_repeats(machine, 6, ["crash"])
    (result,) = results(machine)
    assert (result.outcome, result.reason) == ("complete", None)
    assert (result.largest.cell, result.beyond.cell) == (before.largest.cell, before.beyond.cell)
    fail_repeats(machine, 6, ["crash", "oom"])
    (result,) = results(machine)
    assert result.reason == "batch 6 ran out of memory in 1 of 3 launches"
    assert result.error == OOM, "not that of the crash"


def test_verify_reports_a_plan_that_names_another_fastest_batch(machine):
    machine.run()
    store, run = machine.store, machine.store.run()
    fastest, other = (replace(START, batch=batch).cell_id for batch in (5, 6))
    assert run.walks[0]["fastest"] == fastest
    store.write_run(replace(run, walks=[{**run.walks[0], "fastest": other}]))
    messages = [str(violation) for violation in verify_run(store).violations]
    assert any(f"is {other}, by its launches {fastest}" in text for text in messages), messages
