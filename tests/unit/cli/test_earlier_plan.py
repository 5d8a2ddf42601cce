"""Commands in a run directory of which pairs were tested before: which tests and verdicts stay, and what is launched."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace

import pytest

from benchbox.analysis.sequential import criteria_of, look_at
from benchbox.report.view import build_report
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.instant_launches import InstantLaunches, matrix_of_backends
from tests.support.waiting_policy import write_waiting_policy

MATRIX = matrix_of_backends("ddp", "zero2", "fsdp2", launches=3)
SPEEDS = {"fsdp2": 0.1}  # twice that of ddp
NOISE = {"zero2": 0.3}  # hides whether it is slower than ddp
AUTO = ("--launches", "auto")
STAY = "pairs stay judged by the look of --launches auto after launch"


class Folder:
    """A folder with a matrix, and the commands that measure it."""

    def __init__(self, path, monkeypatch, matrix=MATRIX, options=()):
        self.path, self.options, self.store = path, options, RunStore(path / "run")
        self.launches = InstantLaunches(SPEEDS, NOISE)
        monkeypatch.setattr("benchbox.cli.run_here.run_matrix", self.launches)
        monkeypatch.setattr("benchbox.cli.run_here.report", lambda _: None)
        (path / "looks.yaml").write_text(matrix)

    def run(self, *options, at_most=None):
        self.launches.launched, self.launches.at_most = [], at_most
        ended = run_in_process("run", "looks.yaml", "--out", "run", "--no-estimate", *self.options, *options, cwd=self.path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    @property
    def launched(self):
        """Number of launches of the last command by backend."""
        return dict(Counter(cell.backend for cell, _ in self.launches.launched))

    def plan(self):
        return self.store.run()

    def planned(self):
        """Return the planned launches of the cells that are launched several times, by backend."""
        run = self.plan()
        return {run.cells[cell_id]["backend"]: launches for cell_id, launches in run.planned_launches().items() if launches > 1}

    def verdicts(self):
        """Return the verdicts of pairs, by the backend that is compared with ddp."""
        look = look_at(self.plan(), self.store.records())
        return {pair.subject.cell["backend"]: pair.verdict for pair in (*look.settled, *look.unsettled, *look.refused)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return Folder(tmp_path, monkeypatch)


@pytest.fixture
def looked(folder):
    """The folder after two looks, which --budget ended: fsdp2 is settled at the first, and zero2 is not settled."""
    first, second, *_ = looks_of(folder)
    folder.run(*AUTO, at_most=3 * first + 2 * (second - first))
    assert folder.planned() == {"ddp": second, "zero2": second, "fsdp2": first}
    assert folder.plan().sequential["looks_taken"] == 2
    return folder


def looks_of(folder):
    folder.run(*AUTO, at_most=0)
    return folder.plan().sequential["looks"]


def test_cells_that_are_measured_afresh_leave_the_looks_of_the_others(looked):
    _, second, *_ = looked.plan().sequential["looks"]
    printed = looked.run("--fresh", "--only", "backend=fsdp2")
    assert f"{STAY} {second}: launches that it lacks are measured, and none beyond it" in printed
    run = looked.plan()
    assert criteria_of(run).alpha == pytest.approx(0.01 / len(run.sequential["looks"]))
    assert looked.launched == {"fsdp2": second}, "as many as the cell that it is compared with has"
    assert looked.planned() == {"ddp": second, "zero2": second, "fsdp2": second}
    assert looked.verdicts() == {"zero2": "inconclusive", "fsdp2": "improvement"}


def test_verdicts_of_pairs_are_dropped_where_a_cell_is_measured_afresh(looked):
    assert set(looked.plan().sequential["settled"].values()) == {"improvement"}
    looked.launches.step_s = {"fsdp2": 0.4}
    looked.run("--fresh", "--only", "backend=fsdp2")
    assert looked.plan().sequential["settled"] == {}
    assert looked.verdicts()["fsdp2"] == "regression"


def test_verdicts_of_pairs_stay_where_another_cell_is_measured_afresh(looked):
    before = looked.plan()
    looked.run("--fresh", "--only", "backend=zero2")
    assert looked.plan().sequential == before.sequential


def test_a_reference_that_is_measured_afresh_is_judged_with_as_many_launches_of_every_other_cell(looked):
    first, second, *_ = looked.plan().sequential["looks"]
    looked.run("--fresh", "--only", "backend=ddp")
    assert looked.launched == {"ddp": second}
    assert looked.planned() == {"ddp": second, "zero2": second, "fsdp2": second}
    assert looked.plan().sequential["settled"] == {}
    looked.run()
    assert looked.launched == {"fsdp2": second - first}, "a command that selects it launches what it lacks"
    assert looked.verdicts()["fsdp2"] == "improvement"


@pytest.mark.parametrize("options", [(), ("--only", "backend in [ddp, zero2, fsdp2]")])
def test_a_command_that_measures_all_cells_afresh_begins_anew(looked, options):
    printed = looked.run("--fresh", *options)
    assert STAY not in printed
    assert (looked.plan().sequential, looked.plan().launches) == (None, 3)


def test_launches_of_a_cell_that_left_the_matrix_are_forgotten_where_all_are_measured_afresh(looked):
    (looked.path / "looks.yaml").write_text(MATRIX.replace(", fsdp2", ""))
    looked.run("--fresh")
    assert (looked.plan().sequential, looked.planned()) == (None, {"ddp": 3, "zero2": 3})


def test_a_damaged_plan_is_no_obstacle_where_all_cells_are_measured_afresh(folder):
    folder.run()
    (folder.store.path / "run.json").write_text("{")
    folder.run("--fresh")
    assert folder.planned() == {"ddp": 3, "zero2": 3, "fsdp2": 3}


def test_earlier_tests_are_noted_where_only_some_cells_are_measured_afresh(folder):
    folder.run("--launches", "8")
    printed = folder.run("--launches", "10", "--fresh", "--only", "backend=fsdp2")
    assert folder.plan().earlier_tests == [8]
    assert "pairs were tested after 8 launches before" in printed
    folder.run("--launches", "11", "--fresh")
    assert folder.plan().earlier_tests == []


def test_a_damaged_record_of_a_cell_that_is_measured_afresh_is_no_obstacle(folder):
    folder.run("--launches", "8")
    (cell_id,) = (cell_id for cell_id, cell in folder.plan().cells.items() if cell["backend"] == "fsdp2")
    folder.store.record_path(cell_id, 3).write_text("{")
    folder.run("--launches", "10", "--fresh", "--only", "backend=fsdp2")
    assert folder.plan().earlier_tests == [8]


def test_launches_that_are_too_few_for_any_test_were_none_where_a_record_is_damaged(folder):
    folder.run("--launches", "2")
    (cell_id,) = (cell_id for cell_id, cell in folder.plan().cells.items() if cell["backend"] == "fsdp2")
    folder.store.record_path(cell_id, 1).write_text("{")
    folder.run("--launches", "3", "--fresh", "--only", "backend=fsdp2")
    assert folder.plan().earlier_tests == []


TWO_POLICIES = MATRIX.replace("policy: pi05\n", "").replace("[ddp, zero2, fsdp2]", "[ddp, fsdp2]\n  policy: [edited, other]")


@pytest.fixture
def policies(tmp_path, monkeypatch):
    """A folder with a matrix of two policies, whose sources are its own."""
    waiting = write_waiting_policy(tmp_path, tiny=0.1) / "waiting"
    for name in ("edited", "other"):
        shutil.copytree(waiting, waiting.parent / name)
    return Folder(tmp_path, monkeypatch, TWO_POLICIES, ("--policy-dir", "policies"))


def edit(folder):
    with (folder.path / "policies" / "edited" / "policy.py").open("a") as file:
        file.write("# edited\n")


def settle_before_the_last_look(folder):
    """Settle all pairs at the first look, in a plan that says that a second one was taken, as for a further pair."""
    folder.run(*AUTO)
    run = folder.plan()
    first, second, *_ = run.sequential["looks"]
    settled = {pair.pair_id: pair.verdict for pair in look_at(run, folder.store.records()).settled}
    assert len(settled) == 2
    sequential = {**run.sequential, "looks_taken": 2, "launches": dict.fromkeys(run.cells, first), "settled": settled}
    folder.store.write_run(replace(run, sequential=sequential, measure={**run.measure, "launches": second}))
    return first


def test_looks_and_verdicts_of_a_policy_stay_where_another_one_is_edited(policies):
    first = settle_before_the_last_look(policies)
    edit(policies)
    policies.launches.step_s = {"fsdp2": 0.4}
    assert STAY in policies.run()
    assert {cell.policy for cell, _ in policies.launches.launched} == {"edited"}
    assert policies.launched == {"ddp": first, "fsdp2": first}, "the launches of the matrix would be too few to judge"
    run = policies.plan()
    (kept,) = run.sequential["settled"]
    assert {run.cells[cell_id]["policy"] for cell_id in kept.split("/")} == {"other"}
    look = look_at(run, policies.store.records())
    assert {pair.subject.cell["policy"]: pair.verdict for pair in look.settled} == {
        "edited": "regression",
        "other": "improvement",
    }


def test_earlier_tests_stay_where_launches_of_one_policy_are_outdated(policies):
    policies.run("--launches", "8")
    edit(policies)
    policies.run("--launches", "10")
    assert policies.plan().earlier_tests == [8]


def test_a_cell_whose_records_were_removed_is_judged_again(looked):
    _, second, *_ = looked.plan().sequential["looks"]
    (cell_id,) = (cell_id for cell_id, cell in looked.plan().cells.items() if cell["backend"] == "fsdp2")
    shutil.rmtree(looked.store.path / "cells" / cell_id)
    looked.run()
    assert (looked.launched, looked.plan().sequential["settled"]) == ({"fsdp2": second}, {})


def test_a_verdict_does_not_come_back_with_a_cell_that_had_left_the_matrix(looked):
    matrix = looked.path / "looks.yaml"
    matrix.write_text(MATRIX.replace(", fsdp2", ""))
    looked.run()
    matrix.write_text(MATRIX)
    looked.run()
    assert looked.plan().sequential["settled"] == {}


def test_a_first_look_that_was_interrupted_is_no_look(folder):
    first, *_ = looks_of(folder)
    folder.run(*AUTO, at_most=6)
    assert (folder.plan().launches, folder.plan().sequential["looks_taken"]) == (first, 0)
    printed = folder.run()
    assert STAY not in printed
    run = folder.plan()
    assert (run.sequential, run.launches, folder.launched) == (None, 3, {"ddp": 1, "zero2": 1, "fsdp2": 1})


def test_earlier_tests_stay_where_a_first_look_was_interrupted(folder):
    folder.run("--launches", "6")
    folder.run(*AUTO, at_most=0)
    assert (folder.plan().earlier_tests, folder.plan().sequential["looks_taken"]) == ([6], 0)
    folder.run("--launches", "10")
    assert (folder.plan().earlier_tests, folder.plan().sequential) == ([6], None)


def test_a_first_look_that_was_interrupted_is_taken_by_the_same_command(folder):
    first, *_ = looks_of(folder)
    folder.run(*AUTO, at_most=6)
    printed = folder.run(*AUTO, at_most=3 * first - 6)
    assert f"look 1 of 6, after launch {first}: 1 of 2 pairs settled" in printed
    assert folder.plan().sequential["looks_taken"] == 1


def test_a_later_look_that_was_interrupted_leaves_the_last_complete_one(looked):
    _, second, *_ = looked.plan().sequential["looks"]
    looked.run(*AUTO, at_most=1)
    before = looked.plan()
    assert (before.launches, before.sequential["looks_taken"]) == (second, 2)
    assert f"{STAY} {second}" in looked.run()
    assert (looked.launched, looked.plan().sequential) == ({}, before.sequential)


def test_looks_stay_where_the_command_that_takes_them_again_is_interrupted_before_the_first(looked):
    """The launches of ddp and zero2 were tested at two looks, whatever happens to fsdp2."""
    first, *_ = looked.plan().sequential["looks"]
    looked.run(*AUTO, "--fresh", "--only", "backend=fsdp2", at_most=1)
    assert looked.plan().sequential["looks_taken"] == 2
    assert f"{STAY} {first}" in looked.run()
    assert looked.launched == {"fsdp2": first - 1}


@pytest.mark.parametrize(("launches", "stay"), [(6, False), (8, True)])
def test_an_older_plan_has_looks_if_it_has_the_launches_of_one(folder, launches, stay):
    folder.run(*AUTO, at_most=6)
    run = folder.plan()
    sequential = {key: value for key, value in run.sequential.items() if key != "looks_taken"}
    folder.store.write_run(replace(run, sequential=sequential, measure={**run.measure, "launches": launches}))
    assert (STAY in folder.run()) == stay


WALKS = MATRIX.replace("[ddp, zero2, fsdp2]", "[ddp, zero2, fsdp2]\n  batch: {search: max, start: 2, at_most: 2}")
WALKS = WALKS.replace("batch: 1\n", "", 1).replace("steps: 1, steps: 2", "steps: 3, steps: 2, memory_limit: 64 MiB")


@pytest.fixture
def walks(tmp_path, monkeypatch):
    def predict(starts, *_):
        return {cell.cell_id: "no prediction in this test" for cell in starts}

    monkeypatch.setattr("benchbox.cli.predicting.predict_largest_batches", predict)
    return Folder(tmp_path, monkeypatch, WALKS)


def test_the_tests_of_walks_are_after_the_launches_that_are_tested(walks):
    """The launch that chose a batch is not: the report says the same."""
    walks.run("--launches", "9")
    assert "pairs were tested after 8 launches before" in walks.run("--launches", "11")
    run = walks.plan()
    assert run.earlier_tests == [9]
    assert "Pairs were tested after 8 launches before" in build_report(run, walks.store.records()).sampling


@pytest.fixture
def looked_walks(walks):
    """The walks after two looks, which --budget ended: that of fsdp2 is settled at the first, and that of zero2 is not."""
    first, second, *_ = looks_of(walks)
    assert walks.plan().sequential["looks_taken"] == 0
    walks.run(*AUTO, at_most=3 * first + 2 * (second - first))
    assert walks.planned() == {"ddp": second, "zero2": second, "fsdp2": first}
    return walks


def test_walks_that_search_afresh_leave_the_looks_of_the_others(looked_walks):
    _, second, *_ = looked_walks.plan().sequential["looks"]
    assert f"{STAY} {second}" in looked_walks.run("--fresh", "--only", "backend=fsdp2")
    assert looked_walks.launched == {"fsdp2": second}
    assert looked_walks.planned() == {"ddp": second, "zero2": second, "fsdp2": second}
    assert looked_walks.plan().sequential["settled"] == {}
    assert looked_walks.verdicts() == {"zero2": "inconclusive", "fsdp2": "improvement"}


def test_looks_of_walks_stay_where_a_search_that_begins_afresh_is_interrupted(looked_walks):
    first, *_ = looked_walks.plan().sequential["looks"]
    looked_walks.run(*AUTO, "--fresh", "--only", "backend=fsdp2", at_most=0)
    assert looked_walks.plan().launches == 1
    assert f"{STAY} {first}" in looked_walks.run()
    assert looked_walks.launched == {"fsdp2": first}
    assert looked_walks.planned() == {"ddp": first, "zero2": first, "fsdp2": first}
