"""Launcher for this machine that starts every rank as a new interpreter: one torchrun per job, in a session of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from benchbox.launch.job import Job, Launcher, RankExit, RankGroup, read_rank_exits
from benchbox.launch.process.environment import group_variables, host_variables
from benchbox.launch.process.processes import JOB_VARIABLE, end_processes, find_processes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class TorchrunLauncher(Launcher):
    """Starts every job under `torch.distributed.run`, also with one rank, so that all world sizes are launched alike."""

    name = "torchrun"

    def __init__(self, *, worker_module: str = "benchbox.worker", grace_s: float = 5.0) -> None:
        """Ranks get `grace_s` seconds to end after SIGTERM, then SIGKILL."""
        self._worker_module = worker_module
        self._grace_s = grace_s

    def variables(self, ranks: int) -> dict[str, str]:
        return group_variables(ranks, os.environ)

    def start(self, job: Job) -> RankGroup:
        folder = job.folder.resolve()
        scratch = folder / "torchrun"  # torchrun needs a log folder, by default a new one in /tmp
        exits = folder / "exits.json"
        command = [sys.executable, "-m", "benchbox.launch.process.torchrun", str(exits)]
        command += ["--nproc-per-node", str(job.ranks), "--max-restarts", "0", "--log-dir", str(scratch)]
        # A free port of the loopback device: groups cannot collide, and the host name need not resolve.
        command += ["--standalone", "--local-addr", "127.0.0.1"]
        command += ["-m", self._worker_module, str(job.file.resolve())]
        with job.group_log.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **host_variables(os.environ), **self.variables(job.ranks), JOB_VARIABLE: str(folder)},
                start_new_session=True,  # Ctrl-C reaches only benchbox, which then ends the group
            )
        return _TorchrunGroup(process, str(folder), exits, scratch, self._grace_s)


class _TorchrunGroup(RankGroup):
    def __init__(self, process: subprocess.Popen[bytes], job_id: str, exits: Path, scratch: Path, grace_s: float) -> None:
        self._process = process
        self._job_id = job_id
        self._exits = exits
        self._scratch = scratch
        self._grace_s = grace_s

    def poll(self, timeout_s: float = 0.0) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal_ranks(self, pids: Sequence[int], number: int) -> None:
        for process in find_processes(self._job_id):  # the kernel may have reused the pid of a dead rank
            if process.pid in pids:
                process.send_signal(number)

    def end(self) -> None:
        end_processes(self._job_id, grace_s=self._grace_s)
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def failures(self) -> Sequence[RankExit]:
        return read_rank_exits(self._exits)
