"""Finding and ending every process of a job, wherever in the process tree it is."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

from benchbox.errors import BenchboxError

# Children inherit the environment of their parents: data loaders, compilers and daemons started by a rank are found by this
# variable even when neither sessions (torchrun gives every rank its own) nor parents (they may be dead) lead to them.
JOB_VARIABLE = "BENCHBOX_JOB"

_POLL_S = 0.05
_KILL_LIMIT_S = 30.0


def find_processes(job_id: str) -> list[psutil.Process]:
    """Return every live process, except this one, that was started with `JOB_VARIABLE` set to `job_id`."""
    processes = []
    for process in psutil.process_iter():
        try:
            belongs = process.environ().get(JOB_VARIABLE) == job_id and process.pid != os.getpid()
            if belongs and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue  # it has ended, or belongs to another user
    return processes


def end_processes(job_id: str, *, grace_s: float) -> None:
    """End every process of a job: SIGTERM, at most `grace_s` seconds later SIGKILL; return when none is left.

    Raises:
        BenchboxError: a process survives even SIGKILL.
    """
    if not _signal_all(signal.SIGTERM, job_id, grace_s) and not _signal_all(signal.SIGKILL, job_id, _KILL_LIMIT_S):
        survivors = ", ".join(str(process.pid) for process in find_processes(job_id))
        raise BenchboxError(
            f"process {survivors} cannot be killed and would compete with the next measurement for the machine; "
            "it is stuck in the kernel, which often takes a reset of its device"
        )


def _signal_all(number: signal.Signals, job_id: str, limit_s: float) -> bool:
    """Signal every process of a job once, including those that appear meanwhile; return whether all ended in time."""
    deadline = time.monotonic() + limit_s
    signalled: set[psutil.Process] = set()  # psutil compares processes by pid and creation time
    while alive := find_processes(job_id):
        for process in alive:
            if process not in signalled:
                signalled.add(process)
                _send(process, number)
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):  # it may have ended in between
        process.send_signal(number)
