"""What the tests of this folder share: cells for the stand-in worker, and a launcher that needs no torchrun."""

import os
import subprocess
import sys
from pathlib import Path

from benchbox.launch.job import Job
from benchbox.launch.process.processes import JOB_VARIABLE, end_processes
from benchbox.spec.cell import Cell, MeasureSpec

HERE = Path(__file__).parent
MEASURE = MeasureSpec(warmup_steps=1, steps=2, launches=2, timeout_s=60.0, hang_after_s=3.0)


def cell(behaviour: str, world_size: int = 2, **fields: object) -> Cell:
    """A cell on which the stand-in worker behaves in that way."""
    return Cell(policy="stand_in", size=behaviour, backend="ddp", world_size=world_size, batch=2, **fields)


class DirectLauncher:
    """Another launcher: one rank, started directly. A run treats all launchers alike, and this one starts in no time."""

    name = "direct"

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []

    def variables(self, ranks: int) -> dict[str, str]:
        return {}

    def start(self, job: Job) -> "DirectGroup":
        self.started.append((job.told["cell"]["size"], job.told["launch"]))
        mark = str(job.folder)
        environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", JOB_VARIABLE: mark}
        return DirectGroup(subprocess.Popen([sys.executable, HERE / "stand_in_worker.py", job.file], env=environment), mark)


class DirectGroup:
    def __init__(self, process: subprocess.Popen, mark: str) -> None:
        self.process = process
        self.mark = mark

    def poll(self) -> int | None:
        return self.process.poll()

    def signal_ranks(self, pids: list[int], number: int) -> None:
        for pid in pids:
            os.kill(pid, number)

    def end(self) -> None:
        end_processes(self.mark, grace_s=2.0)
        self.process.wait()

    def failures(self) -> tuple[()]:
        return ()
