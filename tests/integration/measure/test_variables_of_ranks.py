"""Variables in the record of a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import MeasureSpec
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.ranks
def test_variables_are_those_that_a_rank_began_with_and_not_what_a_library_sets_in_it(tmp_path: Path) -> None:
    """Else a compiled cell would differ in them from one that is not."""
    launcher = ForkServerLauncher(worker_module="tests.integration.library_variable_worker")
    measure = MeasureSpec(warmup_steps=1, steps=2, launches=1)
    cell = tiny_cell(backend="single", world_size=1)
    record = launch_cell(cell, measure, launch=1, folder=tmp_path, launcher=launcher)
    launcher.close()
    assert record["status"] == "ok", record["error"]
    variables = record["environment"]["variables"]
    assert variables["OMP_PROC_BIND"] == "false"
    assert "CUBLAS_WORKSPACE_CONFIG" not in variables
