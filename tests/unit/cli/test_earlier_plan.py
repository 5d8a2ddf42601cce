"""Commands in a run directory of which pairs were tested before: which tests and verdicts stay, and what is launched."""

from __future__ import annotations

from collections import Counter

import pytest

from benchbox.analysis.sequential import look_at
from benchbox.report.view import build_report
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.instant_launches import InstantLaunches

MATRIX = """
name: looks
policy: pi05
size: tiny
data: synthetic
world_size: 2
batch: 1
recipe: fp32
axes:
  backend: [ddp, zero2, fsdp2]
measure: {warmup_steps: 1, steps: 2, launches: 3}
reference: {backend: ddp}
"""
SPEEDS = {"fsdp2": 0.1}  # twice that of ddp
NOISE = {"zero2": 0.3}  # hides whether it is slower than ddp


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


WALKS = MATRIX.replace("[ddp, zero2, fsdp2]", "[ddp, zero2, fsdp2]\n  batch: {search: max, start: 2, at_most: 2}")
WALKS = WALKS.replace("batch: 1\n", "", 1).replace("steps: 1, steps: 2", "steps: 3, steps: 2, memory_limit: 64 MiB")


@pytest.fixture
def walks(tmp_path, monkeypatch):
    def predict(starts, *_):
        return {cell.cell_id: "no prediction in this test" for cell in starts}

    monkeypatch.setattr("benchbox.cli.predicting.predict_in_process", predict)
    return Folder(tmp_path, monkeypatch, WALKS)


def test_the_tests_of_walks_are_after_the_launches_that_are_tested(walks):
    """The launch that chose a batch is not: the report says the same."""
    walks.run("--launches", "9")
    assert "pairs were tested after 8 launches before" in walks.run("--launches", "11")
    run = walks.plan()
    assert run.earlier_tests == [9]
    assert "Pairs were tested after 8 launches before" in build_report(run, walks.store.records()).sampling
