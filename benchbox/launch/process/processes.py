"""Finding and ending every process of a group, wherever in the process tree it is by now."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

from benchbox.errors import BenchboxError

# Children inherit the environment of their parents: loaders, compilers and daemons started by a rank are found by this mark
# when neither sessions (torchrun gives each rank its own) nor parents (they may be dead) lead to them any more.
JOB_VARIABLE = "BENCHBOX_JOB"

_POLL_S = 0.05
_KILL_LIMIT_S = 30.0


def find_processes(mark: str) -> list[psutil.Process]:
    """Every live process that was started with `MARK` set to this value."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(JOB_VARIABLE) == mark
                and process.status() != psutil.STATUS_ZOMBIE
                and process.pid != os.getpid()
            ):
                found.append(process)
        except psutil.Error:
            continue  # it is gone, or belongs to someone else
    return found


def end_processes(mark: str, *, grace_s: float) -> None:
    """Ask every marked process to end, wait for at most `grace_s`, kill those that are left, and wait until none is.

    Raises:
        BenchboxError: a process survives even SIGKILL.
    """
    if not _wait_after(signal.SIGTERM, mark, grace_s) and not _wait_after(signal.SIGKILL, mark, _KILL_LIMIT_S):
        survivors = ", ".join(str(process.pid) for process in find_processes(mark))
        raise BenchboxError(
            f"process {survivors} cannot be killed, and would share the machine with whatever is measured next; "
            "it is stuck in the kernel, which often takes a reset of its device"
        )


def _wait_after(number: signal.Signals, mark: str, limit_s: float) -> bool:
    """Send a signal to every marked process, also to those that appear meanwhile, once each; whether all ended in time."""
    deadline = time.monotonic() + limit_s
    asked: set[psutil.Process] = set()  # equal only if pid and time of birth are
    while alive := find_processes(mark):
        for process in alive:
            if process not in asked:
                asked.add(process)
                _send(process, number)
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):  # it may have ended in between
        process.send_signal(number)
