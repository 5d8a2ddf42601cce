from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchbox.launch.process.environment import host_variables
from benchbox.spec.cell import Cell, DataSpec, OptimSpec

ROOT = Path(__file__).parents[2]
RANK_SCRIPTS = ROOT / "tests" / "integration" / "rank_scripts"


def tiny_cell(**changes: Any) -> Cell:
    """pi05 tiny on generated data, learning fast enough that ten steps differ."""
    values: dict[str, Any] = {
        "policy": "pi05",
        "size": "tiny",
        "backend": "ddp",
        "world_size": 2,
        "batch": 2,
        "data": DataSpec(kind="synthetic", workers=0),
        "optim": OptimSpec(lr=1e-3, schedule="warmup_constant", warmup_steps=4, weight_decay=0.1),
    }
    return Cell(**(values | changes))


def run_cells(cells: list[tuple[Cell, int]], folder: Path, *, observer: bool = True, act: bool = False) -> list[dict[str, Any]]:
    """Run cells of one world size, each for its number of steps, in one process group of real ranks.

    With `observer`, further steps are observed; with `act`, the policy acts before it is trained.
    """
    (ranks,) = {cell.world_size for cell, _ in cells}
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.json"
    entries = [{"cell": cell.to_dict(), "steps": steps} for cell, steps in cells]
    job.write_text(json.dumps({"cells": entries, "out": str(folder), "observer": observer, "act": act}))
    run_ranks(ranks, RANK_SCRIPTS / "cells.py", str(job))
    return [json.loads((folder / f"{index}.json").read_text()) | {"index": index} for index in range(len(cells))]


def run_ranks(ranks: int, script: Path, *arguments: str) -> None:
    """Run a script as the ranks of one process group; the test fails if one of them does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), str(script), *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # scripts import `tests.support`
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **host_variables(os.environ), "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        timeout=500,
    )
    if done.returncode:
        pytest.fail(f"ranks failed:\n{done.stderr[-6000:]}")
