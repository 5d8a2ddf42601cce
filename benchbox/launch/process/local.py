"""Jobs on this machine: one torchrun a job, with its ranks in a process group nothing else is in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from benchbox.launch.job import Job, Launcher, RankExit, RankGroup
from benchbox.launch.process.environment import group_variables, host_variables
from benchbox.launch.process.processes import JOB_VARIABLE, end_processes, find_processes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class LocalLauncher(Launcher):
    """Starts every job under `torch.distributed.run`, also those of one rank: one way in, whatever the world size."""

    name = "local"

    def __init__(self, *, worker_module: str = "benchbox.worker", grace_s: float = 5.0) -> None:
        """`grace_s` is how long ranks may take to end when told to, before they are killed."""
        self._worker_module = worker_module
        self._grace_s = grace_s

    def variables(self, ranks: int) -> dict[str, str]:
        return group_variables(ranks, os.environ)

    def start(self, job: Job) -> RankGroup:
        folder = job.folder.resolve()
        scratch = folder / "torchrun"  # torchrun insists on a folder of its own, by default a new one in /tmp
        exits = folder / "exits.json"
        command = [sys.executable, "-m", "benchbox.launch.process.torchrun", str(exits)]
        command += ["--nproc-per-node", str(job.ranks), "--max-restarts", "0", "--log-dir", str(scratch)]
        # A free port of the loopback device: no two groups collide, and the host's own name need not resolve.
        command += ["--standalone", "--local-addr", "127.0.0.1"]
        command += ["-m", self._worker_module, str(job.file.resolve())]
        with job.group_log.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **host_variables(os.environ), **self.variables(job.ranks), JOB_VARIABLE: str(folder)},
                start_new_session=True,  # a Ctrl-C in the terminal is for benchbox, which ends the group in order
            )
        return _LocalGroup(process, str(folder), exits, scratch, self._grace_s)


class _LocalGroup(RankGroup):
    def __init__(self, process: subprocess.Popen[bytes], mark: str, exits: Path, scratch: Path, grace_s: float) -> None:
        self._process = process
        self._mark = mark
        self._exits = exits
        self._scratch = scratch
        self._grace_s = grace_s

    def poll(self) -> int | None:
        return self._process.poll()

    def signal_ranks(self, pids: Sequence[int], number: int) -> None:
        for process in find_processes(self._mark):  # the kernel may have given a dead rank's id to somebody else
            if process.pid in pids:
                process.send_signal(number)

    def end(self) -> None:
        end_processes(self._mark, grace_s=self._grace_s)
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def failures(self) -> Sequence[RankExit]:
        try:
            listed = json.loads(self._exits.read_text())
        except (FileNotFoundError, ValueError):
            return ()  # torchrun had nothing to tell, or was itself killed
        return tuple(RankExit(**each) for each in listed)
