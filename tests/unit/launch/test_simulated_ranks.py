"""Simulated ranks that take too long."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from benchbox.errors import UnsupportedError
from benchbox.launch import simulated_ranks
from benchbox.launch.simulated_ranks import Simulation, simulate_cells
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_cells_that_do_not_end_in_time_say_so_beside_those_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"code": 0, "output": json.dumps({"collectives": {}, "parameter_bytes": 7, "tensors": "fake"}), "errors": ""}
    executable = tmp_path / "python"
    executable.write_text(f"#!/bin/sh\ncat >/dev/null\necho '{json.dumps(answer)}'\nprintf '{{'\nexec sleep 60\n")
    executable.chmod(0o755)
    monkeypatch.setattr(simulated_ranks.sys, "executable", str(executable))
    monkeypatch.setattr(simulated_ranks, "_CELL_LIMIT_S", 3)
    ended = tiny_cell(backend="fsdp2")
    stuck = replace(ended, accumulation=10**6)
    simulations = simulate_cells([ended, stuck], environment=os.environ)
    assert simulations[ended.cell_id] == Simulation(collectives={}, parameter_bytes=7, tensors="fake")
    failure = simulations[stuck.cell_id]
    assert isinstance(failure, UnsupportedError)
    assert str(failure) == "the step of pi05 on fsdp2 cannot be simulated: it has not ended within 6 s"
