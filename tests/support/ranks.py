from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from benchbox.launch.job import Job
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import Cell, DataSpec, OptimSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

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


@dataclass(frozen=True, slots=True)
class CellRun:
    """A cell and its number of steps.

    The collectives of the last step are counted, or the last three steps are observed; with `act`, the policy acts before it
    is trained.
    """

    cell: Cell
    steps: int
    watch: Literal["collectives", "facts"] | None = None
    act: bool = False


def run_cells(runs: Sequence[CellRun], folder: Path) -> list[dict[str, Any]]:
    """Run cells of one world size in one process group of real ranks, and return their results."""
    (ranks,) = {run.cell.world_size for run in runs}
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.json"
    entries = [asdict(run) | {"cell": run.cell.to_dict()} for run in runs]
    job.write_text(json.dumps({"cells": entries, "out": str(folder)}))
    run_ranks(ranks, RANK_SCRIPTS / "cells.py", str(job))
    return [json.loads((folder / f"{index}.json").read_text()) | {"index": index} for index in range(len(runs))]


def run_ranks(ranks: int, script: Path, *arguments: str) -> None:
    """Run a script as the ranks of one process group, from the root folder; the test fails if one of them does."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.chdir(ROOT)
        config: Any = {"script": str(script), "arguments": arguments}
        job = Job(config=config, ranks=ranks, folder=Path(folder) / "job", timeout_s=500.0, hang_after_s=500.0)
        job.prepare()
        group = _launcher().start(job)
        deadline = time.monotonic() + 500
        try:
            while (code := group.poll()) is None and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            group.end()
        if code != 0:
            pytest.fail(f"ranks ended with {code}:\n{job.group_log.read_text()[-6000:]}")


@cache
def _launcher() -> ForkServerLauncher:
    return ForkServerLauncher(worker_module="tests.support.script_worker")
