from __future__ import annotations

import json
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import pytest

from benchbox.launch.job import Job
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import Cell, DataSpec, OptimSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parents[2]
# Ranks that wait for each other for ever use next to no processor time; any that work get a second of it in this time.
STALL_LIMIT_S = 300.0
STALL_POLL_S = 1.0
PROGRESS_CPU_S = 1.0
RANK_SCRIPTS = ROOT / "tests" / "integration" / "rank_scripts"


def tiny_cell(**changes: Any) -> Cell:
    """pi05 tiny on generated data, learning fast enough that its steps differ."""
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

    The collectives of the last step are counted, or the last three steps are observed and the collectives of the middle one
    counted; with `act`, the policy acts before it is trained.
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
        job = Job(config=config, ranks=ranks, folder=Path(folder) / "job", timeout_s=None, hang_after_s=STALL_LIMIT_S)
        job.prepare()
        group: Any = _launcher().start(job)
        leader = group._leader if hasattr(group, "_leader") else group._process.pid  # where no fork server can start
        limit = StallLimit(lambda: cpu_time_s(leader))
        try:
            while (code := group.poll()) is None and not limit.exceeded():
                time.sleep(0.05)
        finally:
            group.end()
        if code != 0:
            ending = f"ended with {code}" if code is not None else f"made no progress for {STALL_LIMIT_S:.0f} s"
            pytest.fail(f"ranks {ending}:\n{job.group_log.read_text()[-6000:]}")


class StallLimit:
    """Limit of the time without progress, which is processor time: on a busy machine work takes longer, but it goes on."""

    def __init__(self, read_cpu_s: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._read_cpu_s = read_cpu_s
        self._clock = clock
        self._cpu_s = read_cpu_s()
        self._progressed_at = self._checked_at = clock()

    def exceeded(self) -> bool:
        now = self._clock()
        if now - self._checked_at < STALL_POLL_S:
            return False
        self._checked_at, cpu_s = now, self._read_cpu_s()
        if abs(cpu_s - self._cpu_s) >= PROGRESS_CPU_S:  # less, when a process ended
            self._cpu_s, self._progressed_at = cpu_s, now
        return now - self._progressed_at > STALL_LIMIT_S


def cpu_time_s(leader: int) -> float:
    """Return the processor time of the processes below the leader of a group, as far as they live."""
    try:
        processes = psutil.Process(leader).children(recursive=True)
    except psutil.NoSuchProcess:
        return 0.0
    total_s = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


@cache
def _launcher() -> ForkServerLauncher:
    return ForkServerLauncher(worker_module="tests.support.script_worker")
