"""Cards of cells: the command of a card runs that cell."""

from __future__ import annotations

import shlex
from pathlib import Path

from benchbox.analysis.summary import varying_fields
from benchbox.plan import plan
from benchbox.plan.only import select
from benchbox.report.cards import run_command
from benchbox.spec import load_matrix
from benchbox.store.run import RunStore
from tests.support.large_runs import PUBLISHED


def test_the_command_of_a_cell_selects_that_cell_of_its_matrix():
    run = RunStore(PUBLISHED).run()
    cells = plan(load_matrix(Path(run.matrix_file), {}, [])).cells
    axes = varying_fields([*run.cells.values()])
    for cell in [*run.cells.values()][::40]:
        words = shlex.split(run_command(run.matrix_file, cell, axes))
        assert words[:4] == ["benchbox", "run", run.matrix_file, "--only"]
        (selected,) = select(words[4], cells)
        assert {axis: getattr(selected, axis) for axis in axes} == {axis: cell[axis] for axis in axes}
