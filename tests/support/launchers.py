"""Cells for the stand-in worker, and a launcher that needs no torchrun."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from benchbox.launch.job import Job, RankGroup
from benchbox.launch.process.processes import JOB_VARIABLE, end_processes
from benchbox.spec.cell import Cell, MeasureSpec

HERE = Path(__file__).parent
MEASURE = MeasureSpec(warmup_steps=1, steps=2, launches=2, timeout_s=60.0, hang_after_s=3.0)


def cell(behaviour: str, world_size: int = 2, **fields: object) -> Cell:
    """Return a cell whose size selects the behaviour of the stand-in worker."""
    return Cell(policy="stand_in", size=behaviour, backend="ddp", world_size=world_size, batch=2, **fields)


class DirectLauncher:
    """Launcher that starts one rank directly, which takes a fraction of the time of torchrun."""

    name = "direct"
    nnodes = 1

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []

    def variables(self, ranks: int) -> dict[str, str]:
        return {}

    def start(self, job: Job) -> "DirectGroup":
        self.started.append((job.config["cell"]["size"], job.config.get("launch", 1)))
        job_id = str(job.folder)
        environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", JOB_VARIABLE: job_id}
        return DirectGroup(subprocess.Popen([sys.executable, HERE / "stand_in_worker.py", job.file], env=environment), job_id)


class DirectGroup(RankGroup):
    def __init__(self, process: subprocess.Popen, job_id: str) -> None:
        self.process = process
        self.job_id = job_id

    def poll(self, timeout_s: float = 0.0) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return self.process.returncode

    def signal_ranks(self, pids: list[int], number: int) -> None:
        for pid in pids:
            os.kill(pid, number)

    def end(self) -> None:
        end_processes(self.job_id, grace_s=2.0)
        self.process.wait()

    def failures(self) -> tuple[()]:
        return ()
