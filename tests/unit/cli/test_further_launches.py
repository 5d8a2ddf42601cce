"""Launches of an earlier command that asked for more: they stay among the figures only if this one could reuse them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.analysis.sequential import criteria_of
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.instant_launches import InstantLaunches, matrix_of_backends

ONE_CELL = ("backends", "--only", "backend=ddp")  # of a shipped matrix
write_records = InstantLaunches({"zero2": 0.203})  # 1.5% slower


@pytest.mark.parametrize("command", [("run", *ONE_CELL, "--no-estimate"), ("noise", *ONE_CELL)])
@pytest.mark.parametrize(("options", "kept"), [((), 13), (("--set", "measure.steps=3"), 12)])
def test_further_launches_of_other_steps_are_not_among_the_figures(tmp_path, monkeypatch, command, options, kept):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in ("cli.run_here", "launch.runner"):  # of `run`, and of `noise`
        monkeypatch.setattr(f"benchbox.{module}.run_matrix", write_records)
    first = run_in_process(*command, "--out", "run", "--launches", "13", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    again = run_in_process(*command, "--out", "run", "--launches", "12", *options, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(list(RunStore(tmp_path / "run").records())) == kept
    assert ("removing 1 further launch" in again.stdout) == (kept == 12)


@pytest.mark.parametrize(
    ("options", "launches"),
    [((), 7), (("--launches", "9"), 7), (("--fresh",), 1), (("--set", "measure.steps=3"), 1)],
    ids=["same", "more launches", "fresh", "other steps"],
)
def test_a_command_without_looks_judges_no_launches_that_were_looked_at_before(tmp_path, monkeypatch, options, launches):
    """The first look, after launch 7, settles the pair. All looks share 1%, and nothing is left for a further test."""
    monkeypatch.setattr("benchbox.cli.run_here.run_matrix", write_records)
    (tmp_path / "looks.yaml").write_text(matrix_of_backends("ddp", "zero2", launches=1))
    command = ("run", "looks.yaml", "--out", "run", "--no-estimate")
    looked = run_in_process(*command, "--launches", "auto", "--resolution", "1%", cwd=tmp_path)
    assert "after launch 7: 1 of 1 pairs settled" in looked.stdout, looked.stderr
    again = run_in_process(*command, *options, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    run = RunStore(tmp_path / "run").run()
    assert run.launches == launches
    assert criteria_of(run).alpha == pytest.approx(0.01 / 6 if launches == 7 else 0.01)
    assert ("pairs stay judged by the look of --launches auto after launch 7" in again.stdout) == (launches == 7)


def test_cells_that_were_not_there_at_the_looks_have_the_launches_of_their_command(tmp_path, monkeypatch):
    monkeypatch.setattr("benchbox.cli.run_here.run_matrix", write_records)
    matrix = tmp_path / "looks.yaml"
    matrix.write_text(matrix_of_backends("ddp", "zero2", launches=1))
    command = ("run", "looks.yaml", "--out", "run", "--no-estimate")
    run_in_process(*command, "--launches", "auto", "--resolution", "1%", cwd=tmp_path)
    matrix.write_text(matrix_of_backends("ddp", "zero2", "fsdp2", launches=1))
    run_in_process(*command, "--launches", "2", cwd=tmp_path)
    run = RunStore(tmp_path / "run").run()
    planned = {run.cells[cell_id]["backend"]: launches for cell_id, launches in run.planned_launches().items()}
    assert planned == {"ddp": 7, "zero2": 7, "fsdp2": 2}


def looked_at(tmp_path, monkeypatch):
    """A run of which a look was taken, after launch 7, and the command that takes none."""
    monkeypatch.setattr("benchbox.cli.run_here.run_matrix", write_records)
    (tmp_path / "looks.yaml").write_text(matrix_of_backends("ddp", "zero2", launches=1))
    command = ("run", "looks.yaml", "--out", "run", "--no-estimate")
    run_in_process(*command, "--launches", "auto", "--resolution", "1%", cwd=tmp_path)
    return RunStore(tmp_path / "run"), command


def test_a_command_without_looks_launches_nothing_beyond_the_look(tmp_path, monkeypatch):
    """Nothing would judge such launches."""
    store, command = looked_at(tmp_path, monkeypatch)
    assert len(store.stored_launches()) == 14
    run_in_process(*command, "--launches", "9", cwd=tmp_path)
    assert len(store.stored_launches()) == 14


def test_looks_are_kept_where_launches_of_a_look_are_missing(tmp_path, monkeypatch):
    """A cell that was not selected lacks launches: the other ones were looked at all the same."""
    store, command = looked_at(tmp_path, monkeypatch)
    cell_id, number = max(store.stored_launches())
    store.remove_record(cell_id, number)
    again = run_in_process(*command, cwd=tmp_path)
    assert "pairs stay judged by the look of --launches auto after launch 7" in again.stdout, again.stderr
    assert criteria_of(store.run()).alpha == pytest.approx(0.01 / 6)


def test_a_run_of_which_nothing_was_launched_has_no_looks_to_keep(tmp_path, monkeypatch):
    store, command = looked_at(tmp_path, monkeypatch)
    for cell_id, number in list(store.stored_launches()):
        store.remove_record(cell_id, number)
    again = run_in_process(*command, cwd=tmp_path)
    assert "pairs stay judged" not in again.stdout
    assert (store.run().sequential, store.run().launches) == (None, 1)


def test_launches_that_are_added_after_a_test_are_said_to_be_tested_again(tmp_path, monkeypatch):
    """Three tests at 1% each: whoever adds launches until a verdict comes is wrong more often than once in a hundred."""
    monkeypatch.setattr("benchbox.cli.run_here.run_matrix", write_records)
    (tmp_path / "looks.yaml").write_text(matrix_of_backends("ddp", "zero2", launches=1))
    command, store = ("run", "looks.yaml", "--out", "run", "--no-estimate", "--launches"), RunStore(tmp_path / "run")
    tests = {}
    for launches in ("4", "5", "5", "6", "8"):
        ended = run_in_process(*command, launches, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        tests[launches] = list(store.run().earlier_tests)
        assert ("pairs were tested after" in ended.stdout) == bool(tests[launches])
    assert tests == {"4": [], "5": [], "6": [5], "8": [5, 6]}, "four launches cannot settle a pair, so that they are no test"
    report = (tmp_path / "run" / "report.md").read_text()
    assert "Pairs were tested after 5 and 6 launches before: all tests together are wrong in up to 3% of runs." in report
    run_in_process(*command, "auto", "--set", "measure.launches=8", cwd=tmp_path)
    assert store.run().earlier_tests == [5, 6, 8], "the looks of --launches auto are no excuse for them"
    run_in_process(*command, "8", "--fresh", cwd=tmp_path)
    assert store.run().earlier_tests == []


def test_tests_of_outdated_launches_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr("benchbox.cli.run_here.run_matrix", write_records)
    (tmp_path / "looks.yaml").write_text(matrix_of_backends("ddp", "zero2", launches=1))
    command = ("run", "looks.yaml", "--out", "run", "--no-estimate", "--launches")
    run_in_process(*command, "5", cwd=tmp_path)
    run_in_process(*command, "6", "--set", "measure.steps=3", cwd=tmp_path)
    assert RunStore(tmp_path / "run").run().earlier_tests == []


def test_launches_that_are_too_few_of_a_cell_were_no_test(tmp_path, monkeypatch):
    monkeypatch.setattr("benchbox.cli.run_here.run_matrix", write_records)
    (tmp_path / "looks.yaml").write_text(matrix_of_backends("ddp", "zero2", launches=1))
    command, store = ("run", "looks.yaml", "--out", "run", "--no-estimate", "--launches"), RunStore(tmp_path / "run")
    run_in_process(*command, "5", cwd=tmp_path)
    store.remove_record(store.stored_launches()[-1][0], 5)
    run_in_process(*command, "6", cwd=tmp_path)
    assert store.run().earlier_tests == []


def test_a_dry_run_counts_no_launches_beyond_the_look(tmp_path, monkeypatch):
    _, command = looked_at(tmp_path, monkeypatch)
    dry = run_in_process(*command[:-1], "--launches", "9", "--dry-run", cwd=tmp_path)
    assert "14 launches are done" in dry.stdout, dry.stdout + dry.stderr
    assert "would run" not in dry.stdout or "0 would run" in dry.stdout, dry.stdout


def test_a_policy_of_an_earlier_plan_may_be_gone(tmp_path, monkeypatch):
    store, command = looked_at(tmp_path, monkeypatch)
    run = store.run()
    store.write_run(replace(run, cells={id_: {**cell, "policy": "gone"} for id_, cell in run.cells.items()}))
    again = run_in_process(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_pairs_that_were_tested_without_the_cells_that_were_not_selected_were_tested(tmp_path, monkeypatch):
    monkeypatch.setattr("benchbox.cli.run_here.run_matrix", write_records)
    (tmp_path / "looks.yaml").write_text(matrix_of_backends("ddp", "zero2", "fsdp2", launches=1))
    command = ("run", "looks.yaml", "--out", "run", "--no-estimate", "--only", "backend!=fsdp2", "--launches")
    for launches in ("6", "7"):
        run_in_process(*command, launches, cwd=tmp_path)
    assert RunStore(tmp_path / "run").run().earlier_tests == [6]
