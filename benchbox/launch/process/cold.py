"""Launcher for this machine that starts every rank as a new interpreter: one torchrun per job, in a session of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from benchbox.launch.job import Job, Launcher, RankExit, RankGroup, read_rank_exits
from benchbox.launch.process.environment import group_variables, rank_environment
from benchbox.launch.process.processes import JOB_VARIABLE, end_processes, signal_processes
from benchbox.worker.stop_signals import LAUNCHER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchbox.launch.nodes.settings import NodeSettings


class TorchrunLauncher(Launcher):
    """Starts every job under `torch.distributed.run`, also with one rank, so that all world sizes are launched alike."""

    name = "torchrun"

    def __init__(
        self, *, worker_module: str = "benchbox.worker", grace_s: float = 5.0, nodes: NodeSettings | None = None
    ) -> None:
        """Create a launcher.

        Args:
            worker_module: run by every rank.
            grace_s: seconds that ranks get to end after SIGTERM, before SIGKILL.
            nodes: the nodes that each job is started on; this launcher starts the ranks of one of them.
        """
        self._worker_module = worker_module
        self._grace_s = grace_s
        self._nodes = nodes
        self.nnodes = 1 if nodes is None else nodes.count

    def variables(self, ranks: int) -> dict[str, str]:
        return group_variables(ranks // self.nnodes, os.environ)

    def command(self, job: Job) -> list[str]:
        """Return the command that starts the ranks of a job, or those of this node."""
        command = [sys.executable, "-m", "benchbox.launch.process.torchrun", str(job.exits.resolve())]
        command += ["--nproc-per-node", str(job.ranks // self.nnodes), "--max-restarts", "0"]
        command += ["--log-dir", str(job.torchrun_folder.resolve())]
        if self._nodes is None:
            # A free port of the loopback device: groups cannot collide, and the host name need not resolve.
            command += ["--standalone", "--local-addr", "127.0.0.1"]
        else:
            command += ["--nnodes", str(self._nodes.count), "--node-rank", str(self._nodes.rank)]
            command += ["--master-addr", self._nodes.master_addr, "--master-port", str(self._nodes.master_port)]
        return [*command, "-m", self._worker_module, str(job.file.resolve())]

    def start(self, job: Job, variables: Mapping[str, str] | None = None) -> RankGroup:
        """Start a prepared job, or its ranks on this node.

        Args:
            variables: set by the launcher of another node; those that the user has set on this node are left unchanged.
        """
        if variables is None:
            added = self.variables(job.ranks)
        else:
            added = {name: value for name, value in variables.items() if not os.environ.get(name)}
        with job.group_log.open("wb") as log:
            process = subprocess.Popen(
                self.command(job),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=rank_environment(os.environ, added) | {JOB_VARIABLE: job.job_id, LAUNCHER_VARIABLE: str(os.getpid())},
                start_new_session=True,  # Ctrl-C reaches only benchbox, which then ends the group
            )
        return _TorchrunGroup(process, job, self._grace_s)


class _TorchrunGroup(RankGroup):
    def __init__(self, process: subprocess.Popen[bytes], job: Job, grace_s: float) -> None:
        self._process = process
        self._job_id = job.job_id
        self._exits: Path = job.exits.resolve()
        self._scratch: Path = job.torchrun_folder.resolve()
        self._grace_s = grace_s

    def poll(self, timeout_s: float = 0.0) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal_ranks(self, pids: Sequence[int], number: int) -> None:
        signal_processes(self._job_id, pids, number)

    def end(self) -> None:
        end_processes(self._job_id, grace_s=self._grace_s)
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def failures(self) -> Sequence[RankExit]:
        return read_rank_exits(self._exits)
