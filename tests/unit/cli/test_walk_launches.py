from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from benchbox.analysis.baseline import BaselineLookup, make_baseline
from benchbox.analysis.certificates import certificates
from benchbox.analysis.gate import gate
from benchbox.analysis.invariants import verify_run
from benchbox.analysis.summary import summarize
from benchbox.cli.earlier_plan import follow_earlier_plan
from benchbox.cli.predicting import predict_largest_batches
from benchbox.cli.walk_launches import check_memory_limit, plan_walks
from benchbox.errors import ConfigurationError
from benchbox.spec import load_matrix
from benchbox.spec.cell import Cell
from benchbox.spec.matrix import BatchSearch
from tests.support.example_run import MEASURE, example_record
from tests.support.predictions import predicting_in_this_process
from tests.support.walks import OUT_OF_MEMORY, START, Killed, Machine, cameras

ONE_LAUNCH = replace(MEASURE, launches=1, memory_limit=2**30)


def test_every_batch_is_a_cell_of_the_plan_with_a_launch_of_its_own(tmp_path):
    machine = Machine(tmp_path, lambda _: 6, measure=ONE_LAUNCH, predicted=6)
    machine.run()
    assert machine.launched == [(replace(START, batch=batch), 1) for batch in (2, 6, 7)]
    run = machine.store.run()
    assert [cell["batch"] for cell in run.cells.values()] == [2, 6, 7]
    (walk,) = run.walks
    assert [run.cells[cell_id]["batch"] for cell_id in walk["cells"]] == [2, 6, 7]


def test_running_out_of_memory_is_no_failure_of_a_walk(tmp_path):
    _, summary = Machine(tmp_path, lambda _: 6, predicted=6).run()
    assert (summary.failed_cells, summary.executed) == (set(), 4)


def test_another_failure_ends_the_walk_and_is_tried_again_by_the_next_command(tmp_path):
    machine = Machine(tmp_path, lambda _: 6, measure=ONE_LAUNCH, predicted=6, failures={6: "hang"})
    _, summary = machine.run()
    assert (machine.batches, len(summary.failed_cells)) == ([2, 6], 1)
    machine.failures.clear()
    machine.run()
    assert machine.batches == [2, 6, 6, 7]


def run_until_done(machine: Machine, *, killed_after: int) -> None:
    """Kill every command after so many launches, and repeat it until one ends."""
    for _ in range(100):
        try:
            machine.run(at_most_launches=killed_after)
        except Killed:
            continue
        return


@pytest.mark.parametrize("predicted", [None, 9])
def test_a_walk_that_is_killed_after_every_launch_goes_on_as_if_it_had_not_been(tmp_path, predicted):
    machine = Machine(tmp_path / "whole", lambda _: 12, predicted=predicted)
    machine.run()
    killed = replace(machine, folder=tmp_path / "killed", launched=[])
    run_until_done(killed, killed_after=1)
    assert killed.launched == machine.launched
    assert killed.store.run().walks == machine.store.run().walks
    killed.run()
    assert killed.launched == machine.launched, "everything was done"
    assert verify_run(killed.store).violations == ()


def test_several_walks_that_are_killed_within_rounds_repeat_no_launch(tmp_path):
    """Bounds may reach another walk earlier than without kills: other launches may be taken, but never one twice."""
    machine = Machine(tmp_path, lambda cell: 12 // cell.cams, starts=cameras(1, 2, 4), predicted=9)
    run_until_done(machine, killed_after=4)
    assert len(set(machine.launched)) == len(machine.launched)
    results = certificates(machine.store.run(), summarize(machine.store.run(), machine.store.records()))
    assert [(result.largest.cell["batch"], result.beyond.cell["batch"]) for result in results] == [(12, 13), (6, 7), (3, 4)]


def test_the_further_launches_are_those_of_the_fastest_batch(tmp_path):
    machine = Machine(tmp_path, lambda _: 9, measure=replace(MEASURE, launches=3), predicted=4, fastest=4)
    machine.run()
    assert [(cell.batch, number) for cell, number in machine.launched if number > 1] == [(4, 2), (4, 3)]
    run = machine.store.run()
    assert run.walks[0]["fastest"] == replace(START, batch=4).cell_id
    assert {run.cells[cell_id]["batch"]: launches for cell_id, launches in run.planned_launches().items()}[4] == 3
    assert sum(run.planned_launches().values()) == len(machine.launched)


def test_what_is_pending_follows_from_the_records_alone(tmp_path):
    machine = Machine(tmp_path, lambda _: 9, measure=replace(MEASURE, launches=3), predicted=4, fastest=4)
    while pending := machine.open().pending():
        with suppress(Killed):
            machine.run(at_most_launches=1)
        assert machine.launched[-1] == pending[0]
        assert machine.open().done() == len(machine.launched)
    assert [(cell.batch, number) for cell, number in machine.launched][-2:] == [(4, 2), (4, 3)]


def test_a_walk_that_cannot_fit_is_skipped_and_names_the_launch_that_shows_it(tmp_path):
    machine = Machine(tmp_path, lambda _: 0, starts=cameras(4, 1), measure=ONE_LAUNCH)
    machine.run()
    assert {cell.cams for cell, _ in machine.launched} == {1}
    (skip,) = machine.store.run().skipped
    assert skip["cell"]["cams"] == 4
    cell_id = replace(START, batch=1).cell_id
    assert skip["reason"].startswith(f"pruned: launch 1 of {cell_id} (cams=1, checkpointing=no) ran out of memory at batch 1")


def test_launches_of_one_walk_bound_another(tmp_path):
    """With 4 cameras batch 3 does not fit, so that with 8 batch 7, which theory predicts, is not tried."""
    machine = Machine(tmp_path, lambda _: 2, starts=cameras(4), measure=ONE_LAUNCH, predicted=7)
    machine.run()
    machine.starts = cameras(4, 8)
    machine.run()
    batches = {cams: [cell.batch for cell, _ in machine.launched if cell.cams == cams] for cams in (4, 8)}
    assert batches == {4: [2, 7, 6, 5, 3], 8: [2, 3]}


def test_another_memory_limit_begins_the_walk_anew(tmp_path):
    machine = Machine(tmp_path, lambda _: 6, measure=ONE_LAUNCH, predicted=6)
    machine.run()
    machine.measure, machine.largest, machine.predicted = replace(ONE_LAUNCH, memory_limit=2**31), lambda _: 11, 11
    machine.run()
    assert machine.batches == [2, 6, 7, 2, 11, 12]
    assert [cell["batch"] for cell in machine.store.run().cells.values()] == [2, 11, 12]
    assert verify_run(machine.store).violations == ()


def test_a_walk_that_other_walks_end_under_another_limit_keeps_no_record_of_the_earlier_one(tmp_path):
    """The launch at its first batch was ok under the earlier limit, and is not repeated."""
    machine = Machine(tmp_path, lambda _: 6, starts=cameras(4, 8), measure=ONE_LAUNCH, predicted=6)
    machine.run()
    machine.measure, machine.largest, machine.predicted = replace(ONE_LAUNCH, memory_limit=2**29), lambda _: 0, 0
    _, summary = machine.run()
    run = machine.store.run()
    assert [cell["cams"] for cell in run.cells.values()] == [4, 4], "batches 2 and 1"
    assert [entry["cell"]["cams"] for entry in run.skipped] == [8]
    assert {record["cell"]["cams"] for record in machine.store.records()} == {4}
    assert len(summary.failed_cells) == 1
    assert verify_run(machine.store).violations == ()


def test_a_first_batch_that_is_beyond_another_walk_keeps_no_record_of_an_earlier_limit(tmp_path):
    machine = Machine(tmp_path, lambda _: 6, starts=cameras(4, 8), search=BatchSearch(start=4), measure=ONE_LAUNCH, predicted=6)
    machine.starts = tuple(replace(cell, batch=4) for cell in machine.starts)
    machine.run()
    machine.measure, machine.largest, machine.predicted = replace(ONE_LAUNCH, memory_limit=2**29), lambda _: 2, 2
    machine.run()
    results = certificates(machine.store.run(), summarize(machine.store.run(), machine.store.records()))
    assert [(result.outcome, result.largest.cell["batch"]) for result in results] == [("complete", 2)] * 2
    assert verify_run(machine.store).violations == ()


def test_a_prediction_is_made_once_for_a_memory_limit(tmp_path):
    earlier = Machine(tmp_path, lambda _: 6, measure=ONE_LAUNCH, predicted=6)
    earlier.run()
    for memory_limit, predicted in ((ONE_LAUNCH.memory_limit, 6), (2**31, None)):
        described = replace(earlier.store.run(), walks=[], measure=asdict(replace(ONE_LAUNCH, memory_limit=memory_limit)))
        (walk,) = plan_walks(described, earlier.starts, earlier.search, earlier.store.run()).walks
        assert walk["predicted_batch"] == predicted


def test_a_prediction_up_to_another_batch_is_made_anew(tmp_path):
    machine = Machine(tmp_path, lambda _: 40, measure=ONE_LAUNCH, search=BatchSearch(start=2, at_most=8), predicted=8)
    machine.run()
    described = replace(machine.store.run(), walks=[])
    for at_most, predicted in ((8, 8), (None, None), (16, None)):
        (walk,) = plan_walks(described, machine.starts, BatchSearch(start=2, at_most=at_most), machine.store.run()).walks
        assert walk["predicted_batch"] == predicted


@pytest.mark.parametrize("is_outdated", [False, True])
def test_a_prediction_of_other_sources_is_made_anew(tmp_path, monkeypatch, is_outdated):
    machine = Machine(tmp_path, lambda _: 6, measure=ONE_LAUNCH, predicted=6)
    with pytest.raises(Killed):
        machine.run(at_most_launches=1)
    if is_outdated:
        (record,) = machine.store.records()
        machine.store.write_record(record | {"environment": {**record["environment"], "policy_sha256": "another"}})
    walks = machine.open()
    predicted = {walks.run.walks[0]["cells"][0]: 9}
    monkeypatch.setattr("benchbox.cli.predicting.predict_largest_batches", lambda *_: predicted)
    walks.predict(SimpleNamespace(print=lambda *_: None))
    assert walks.run.walks[0]["predicted_batch"] == (9 if is_outdated else 6)


def test_fresh_repeats_every_launch_of_a_walk(tmp_path):
    machine = Machine(tmp_path, lambda _: 6, predicted=6)
    machine.run()
    launched = list(machine.launched)
    machine.run(fresh=True)
    assert machine.launched == launched * 2


def test_a_walk_that_began_anew_and_was_killed_goes_on_with_what_it_has_measured_since(tmp_path):
    machine = Machine(tmp_path, lambda _: 6, predicted=6)
    machine.run()
    launched = list(machine.launched)
    machine.launched.clear()
    with pytest.raises(Killed):
        machine.run(fresh=True, at_most_launches=2)
    machine.run()
    assert machine.launched == launched


def test_a_set_up_of_which_nothing_fits_has_failed_also_when_nothing_is_left_to_launch(tmp_path):
    machine = Machine(tmp_path, lambda _: 0)
    for _ in range(2):
        _, summary = machine.run()
        (walk,) = machine.store.run().walks
        assert summary.failed_cells == {walk["cells"][0]}


def test_a_start_that_other_walks_show_not_to_fit_is_no_missing_cell(tmp_path):
    """The gate, and a baseline, take it as a batch that ran out of memory."""
    starts = [replace(cell, batch=4) for cell in cameras(4, 8)]
    machine = Machine(tmp_path, lambda _: 2, starts=starts, measure=ONE_LAUNCH)
    machine.run()
    assert (starts[1], 1) not in machine.launched
    run = machine.store.run()
    summaries = summarize(run, machine.store.records())
    assert {row.verdict for row in gate(run, summaries, BaselineLookup(None, "no baseline"))} == {"ok"}
    assert starts[1].cell_id not in make_baseline(run, summaries, "machine").cells


def test_another_start_of_walks_that_have_ended_is_launched(tmp_path):
    """All set-ups are compared at an equal batch."""
    machine = Machine(tmp_path, lambda _: 6, measure=ONE_LAUNCH, predicted=6)
    machine.run()
    machine.starts = [replace(START, batch=4)]
    machine.launched.clear()
    machine.run()
    assert machine.batches == [4]


def test_a_search_that_nothing_limits_is_refused_at_its_line(tmp_path, monkeypatch):
    path = tmp_path / "m.yaml"
    path.write_text(
        "name: m\npolicy: pi05\nsize: tiny\ndata: synthetic\nworld_size: 1\nbackend: single\n"
        "axes:\n  recipe: [fp32]\n  batch: {search: max}\n"
    )
    monkeypatch.setattr("benchbox.launch.process.environment.has_cuda_device", lambda _: False)
    with pytest.raises(ConfigurationError, match=r"m\.yaml:9:10: without a GPU a search needs measure\.memory_limit"):
        check_memory_limit(load_matrix(path), {})
    limited = load_matrix(path, {"measure.memory_limit": "64 MiB"})
    assert check_memory_limit(limited, {"measure.memory_limit": "64 MiB"}) is None
    monkeypatch.setattr("benchbox.launch.process.environment.has_cuda_device", lambda _: True)
    assert check_memory_limit(load_matrix(path), {}) is None


def test_a_walk_that_was_not_selected_is_not_gone_on_with(tmp_path):
    machine = Machine(tmp_path, lambda _: 6, starts=cameras(1, 4), measure=ONE_LAUNCH, predicted=6)
    with pytest.raises(Killed):
        machine.run(at_most_launches=2)
    walks = machine.open()
    assert {cell.cams for cell, _ in walks.pending()} == {1, 4}
    walks.selected = machine.starts[1:]
    assert {cell.cams for cell, _ in walks.pending()} == {4}


def test_a_search_that_begins_anew_leaves_walks_that_were_not_selected_as_they_are(tmp_path):
    first, second = cameras(1, 4)
    machine = Machine(tmp_path, lambda _: 6, starts=(first, second), predicted=6)
    machine.run()
    run, files = machine.store.run(), {path: path.read_bytes() for path in tmp_path.rglob("launch-*.json")}
    machine.launched.clear()
    machine.only = (first,)
    machine.run(fresh=True)
    assert {cell.cams for cell, _ in machine.launched} == {1}
    assert set(machine.batches) == {2, 6, 7}
    assert machine.store.run().walks[1] == run.walks[1]
    untouched = {path: content for path, content in files.items() if f'"cams": {second.cams}' in content.decode()}
    assert untouched
    assert {path: path.read_bytes() for path in untouched} == untouched


def test_outdated_batches_of_walks_that_were_not_selected_stay_in_the_plan(tmp_path):
    first, second = cameras(1, 4)
    machine = Machine(tmp_path, lambda _: 6, starts=(first, second), measure=ONE_LAUNCH, predicted=6)
    machine.run()
    before = machine.store.run().walks
    machine.measure = replace(ONE_LAUNCH, steps=MEASURE.steps + 1)
    machine.only = (first,)
    machine.run()
    assert machine.store.run().walks == before


@pytest.mark.parametrize(
    ("body", "process", "reason"),
    [
        ("raise KeyError('no weights')", predicting_in_this_process, "no weights"),
        ("import os; os._exit(9)", nullcontext, "the process that predicts was killed"),
    ],
)
def test_a_search_goes_on_without_a_prediction_whatever_happens_to_it(tmp_path, body, process, reason):
    """The code of a policy raises, or ends the process that traces it."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "presets.yaml").write_text("tiny: {}\n")
    (tmp_path / "broken" / "policy.py").write_text(f"def build(preset, axes):\n    {body}\n")
    cell = replace(START, policy="broken")
    with process():
        predictions = predict_largest_batches([cell], [tmp_path], 3, 2**30, None)
    assert reason in predictions[cell.cell_id]


def fail_a_repeat(machine, status, error):
    """Write a record of the second launch of the fastest batch that did not end ok."""
    (walk,) = machine.store.run().walks
    record = machine.store.record(walk["fastest"], 2)
    failed = example_record(Cell.from_dict(record["cell"]), 2, status=status, error=error)
    machine.store.write_record(failed | {key: record[key] for key in ("environment", "memory_limit_bytes", "started_at")})


def test_a_repeat_of_the_fastest_batch_that_runs_out_of_memory_is_an_honest_record_without_certificate(tmp_path):
    """Memory was fragmented, or another process took some: either way the batch does not fit whenever it is launched."""
    machine = Machine(tmp_path, lambda _: 6, predicted=6, fastest=6)
    machine.run()
    fail_a_repeat(machine, "oom", OUT_OF_MEMORY)
    run = machine.store.run()
    (result,) = certificates(run, summarize(run, machine.store.records()))
    assert (result.is_complete, result.reason) == (False, "batch 6 ran out of memory in 1 of 2 launches")
    assert verify_run(machine.store).violations == ()


def test_a_repeat_that_ended_otherwise_contradicts_no_certificate(tmp_path):
    machine = Machine(tmp_path, lambda _: 6, predicted=6, fastest=6)
    machine.run()
    fail_a_repeat(machine, "crash", OUT_OF_MEMORY | {"type": "RuntimeError"})
    assert verify_run(machine.store).violations == ()


def test_a_search_does_not_go_on_because_a_repeat_ran_out_of_memory(tmp_path):
    """The next batch follows from the first launches alone, and so do the repeats."""
    machine = Machine(tmp_path, lambda _: 6, predicted=6, fastest=6)
    machine.run()
    walks = machine.store.run().walks
    fail_a_repeat(machine, "oom", OUT_OF_MEMORY)
    assert {cell.batch for cell, _ in machine.open().pending()} <= {6}
    machine.launched.clear()
    machine.run()
    assert all(number > 1 for _, number in machine.launched)
    assert machine.store.run().walks == walks


def test_a_fastest_batch_is_not_repeated_beyond_the_look_that_judges_it(tmp_path):
    machine = Machine(tmp_path, lambda _: 6, measure=replace(MEASURE, launches=9), predicted=6)
    walks = machine.open()
    sequential = {"looks": [4, 6], "resolution": 0.02, "launches": {}, "settled": {}}
    looked = replace(walks.run, sequential=sequential, measure={**walks.run.measure, "launches": 4})
    walks.run = looked
    machine.open = lambda **_: walks
    machine.run()
    assert max(number for _, number in machine.launched) == 4


@pytest.mark.parametrize(("launches", "tests"), [(5, []), (6, [6])])
def test_two_walks_are_one_pair_of_an_earlier_test_whatever_batches_they_tried(tmp_path, launches, tests):
    """Five launches after the search settle a pair, and would not settle one for each batch."""
    backends = [replace(START, backend=name) for name in ("fsdp1_full", "zero2")]
    machine = Machine(tmp_path, lambda _: 6, backends, replace(MEASURE, launches=launches), predicted=6, fastest=6)
    machine.run()
    later = replace(machine.open().run, measure=asdict(replace(machine.measure, launches=9)))
    assert follow_earlier_plan(later, machine.store, machine.measure, ()).earlier_tests == tests


def test_a_search_for_looks_that_was_interrupted_leaves_no_look_to_keep(tmp_path):
    machine = Machine(tmp_path, lambda _: 6, measure=replace(MEASURE, launches=1), predicted=6)
    machine.run()
    sequential = {"looks": [8, 11], "resolution": 0.02, "launches": {}, "settled": {}}
    machine.store.write_run(replace(machine.store.run(), sequential=sequential))
    later = replace(machine.open().run, measure=asdict(replace(machine.measure, launches=9)))
    followed = follow_earlier_plan(later, machine.store, machine.measure, ())
    assert (followed.sequential, followed.launches) == (None, 9)


def test_walks_are_judged_again_where_any_batch_of_one_is_outdated(tmp_path):
    """The search may end at another batch."""
    backends = [replace(START, backend=name) for name in ("fsdp1_full", "zero2")]
    machine = Machine(tmp_path, lambda _: 6, backends, replace(MEASURE, launches=8), predicted=6, fastest=6)
    machine.run()
    run, later = machine.store.run(), machine.open().run
    pair = "/".join(walk["fastest"] for walk in run.walks)
    looks = {"looks": [6, 8], "resolution": 0.02, "looks_taken": 2, "settled": {pair: "neutral"}}
    early = {cell_id: 6 for walk in run.walks for cell_id in walk["cells"]}
    machine.store.write_run(replace(run, sequential={**looks, "launches": early}))
    followed = follow_earlier_plan(later, machine.store, machine.measure, ())
    assert followed.sequential == {**looks, "launches": early}
    start = machine.store.record(run.walks[0]["cells"][0], 1)
    machine.store.write_record(start | {"steps": 99})
    followed = follow_earlier_plan(later, machine.store, machine.measure, ())
    assert (followed.sequential["settled"], followed.sequential["launches"], followed.launches) == ({}, {}, 8)
