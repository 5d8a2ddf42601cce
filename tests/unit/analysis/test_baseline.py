"""Baselines: the one that a run is compared with, and those that are refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from benchbox.analysis.baseline import baseline_problems, find_baseline, make_baseline, slug
from benchbox.analysis.summary import summarize
from benchbox.errors import EXIT_THRESHOLD, RecordError, ThresholdError
from benchbox.store.baseline import Baseline, baseline_path, write_baseline
from tests.support.example_baseline import COMPLETE, STEP_S, example_baseline
from tests.support.example_run import CELL, MEASURE, OOM, example_record, example_run, steady_records


@pytest.fixture
def baseline():
    return example_baseline()


def test_a_baseline_is_refused_unless_the_run_is_complete():
    run = example_run([CELL])
    for records in ([], COMPLETE[:1], [COMPLETE[0], example_record(launch=2, status="oom", error=OOM)]):
        with pytest.raises(ThresholdError, match="1 of 1 cells are not ok in all 2 launches") as caught:
            make_baseline(run, summarize(run, records), "example")
        assert caught.value.exit_code == EXIT_THRESHOLD


def test_the_baseline_of_this_machine_is_found_and_that_of_another_is_not_compared(tmp_path, baseline):
    run = example_run([CELL])
    missing = find_baseline(run, COMPLETE, tmp_path)
    assert missing.baseline is None
    assert "benchbox baseline promote RUN" in missing.remedy
    path = baseline_path(tmp_path, "example-cpu-2-cores", "example")
    write_baseline(path, baseline)
    assert find_baseline(run, COMPLETE, tmp_path).baseline == find_baseline(run, COMPLETE, path).baseline == baseline
    elsewhere = [record | {"environment": {"machine": "Another"}} for record in COMPLETE]
    rejected = find_baseline(run, elsewhere, path)
    assert rejected.baseline is None
    assert "example-cpu-2-cores, and this run on another: not comparable" in rejected.remedy


def test_a_baseline_of_other_numbers_of_steps_is_not_compared(tmp_path, baseline):
    path = tmp_path / "example.json"
    write_baseline(path, baseline)
    for changed, text in (({"steps": 8}, "8 measured steps against 4"), ({"warmup_steps": 7}, "7 warm-up steps against 1")):
        found = find_baseline(example_run([CELL], measure=asdict(MEASURE) | changed), COMPLETE, path)
        assert found.baseline is None
        assert f"not like for like with this run: {text}: promote" in found.remedy


def test_a_launch_that_ran_out_of_memory_hides_no_difference_of_the_others(tmp_path, baseline):
    """Its ranks ended before they reported versions, and the last launch of a walk is often such a one."""
    path = tmp_path / "example.json"
    write_baseline(path, baseline)
    environment = {**COMPLETE[-1]["environment"], "torch": "2.99.0"}
    newer = [record | {"environment": environment} for record in COMPLETE]
    failed = example_record(launch=9, status="oom", error=OOM) | {"environment": {"launcher": "fork_server"}}
    found = find_baseline(example_run([CELL]), [*newer, failed], path)
    assert found.baseline is None
    assert "torch 2.99.0 against 2.13.0" in found.remedy


def test_a_run_is_never_its_own_baseline(tmp_path):
    records = steady_records(step_s=STEP_S)
    run = example_run([CELL], measure=asdict(MEASURE) | {"launches": 5})
    path = tmp_path / "own.json"
    write_baseline(path, make_baseline(run, summarize(run, records), "example"))
    own = find_baseline(run, records, path)
    assert own.baseline is None
    assert "was promoted from this run (5 launches are the same): measure another run" in own.remedy
    assert find_baseline(run, steady_records(step_s=STEP_S, started="2026-01-02"), path).baseline is not None


def test_figures_of_a_baseline_that_its_launches_do_not_give_are_named(baseline):
    assert baseline_problems(baseline) == []
    edited = json.loads(json.dumps(asdict(baseline)))
    edited["cells"][CELL.cell_id]["values"]["step_time_s"]["value"] *= 0.5
    edited["cells"]["f" * 12] = {**edited["cells"][CELL.cell_id], "values": {}}
    problems = baseline_problems(Baseline(**edited))
    assert problems[0].startswith(f"cell {CELL.cell_id}: step_time_s is ")
    assert problems[1:] == [f"cell {'f' * 12}: the id is not the hash of its configuration"]


def test_a_baseline_file_that_was_named_must_exist(tmp_path):
    with pytest.raises(RecordError, match="no such file"):
        find_baseline(example_run([CELL]), COMPLETE, tmp_path / "absent.json")


def test_a_machine_name_is_safe_as_a_folder():
    assert slug("AMD EPYC 9R14 / 2 x H200 (141 GB)") == "amd-epyc-9r14-2-x-h200-141-gb"
    assert slug("../..") == "machine"


def test_the_baseline_of_cells_with_other_numbers_of_ranks_and_so_of_threads_is_found(tmp_path):
    cells = [replace(CELL, backend="single", world_size=1), CELL]

    def records(day):
        return [
            record | {"environment": {**record["environment"], "threads": 2 // cell.world_size}}
            for cell in cells
            for record in steady_records(cell, step_s=STEP_S, started=day)
        ]

    run = example_run(cells, measure=asdict(MEASURE) | {"launches": 5})
    path = tmp_path / "example.json"
    write_baseline(path, make_baseline(run, summarize(run, records("2025-12-31")), "example"))
    found = find_baseline(run, records("2026-01-01"), path)
    assert found.baseline is not None, found.remedy


def test_a_run_that_was_resumed_after_an_upgrade_is_not_compared_with_a_baseline(tmp_path, baseline):
    """Its latest launch has the versions of the baseline."""
    path = tmp_path / "example.json"
    write_baseline(path, baseline)
    first, second = COMPLETE
    older = first | {"environment": first["environment"] | {"torch": "2.0.0"}}
    found = find_baseline(example_run([CELL]), [older, second], path)
    assert found.baseline is None
    assert "launches of the run differ in torch: 2.0.0, 2.13.0" in found.remedy
    assert find_baseline(example_run([CELL]), COMPLETE, path).baseline is not None
