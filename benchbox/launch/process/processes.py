"""Finding and ending every process of a job, wherever in the process tree it is."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

import psutil

from benchbox.errors import BenchboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# Children inherit the environment of their parents: data loaders, compilers and daemons started by a rank are found by this
# variable even when neither sessions (torchrun gives every rank its own) nor parents (they may be dead) lead to them.
JOB_VARIABLE = "BENCHBOX_JOB"

_POLL_S = 0.05
_KILL_LIMIT_S = 30.0


def find_processes(job_id: str, *, session: int | None = None) -> list[psutil.Process]:
    """Return every live process of a job, except this one.

    Args:
        job_id: value of `JOB_VARIABLE` in the environment that a process was started with.
        session: id of the session of a forked group. The system shows the environment of the server for forked processes, but
            they are in the session of their leader; programs that they start are found by either. The leader has the same id,
            and is found before it has started the session.
    """
    processes = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            in_session = session is not None and session in (process.pid, os.getsid(process.pid))
            if in_session or process.environ().get(JOB_VARIABLE) == job_id:
                processes.append(process)
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue  # it has ended, or belongs to another user
    return processes


def end_processes(job_id: str, *, session: int | None = None, grace_s: float) -> None:
    """End every process of a job: SIGTERM, at most `grace_s` seconds later SIGKILL; return when none is left.

    Raises:
        BenchboxError: a process survives even SIGKILL.
    """

    def find() -> list[psutil.Process]:
        return find_processes(job_id, session=session)

    if not _signal_all(signal.SIGTERM, find, grace_s) and not _signal_all(signal.SIGKILL, find, _KILL_LIMIT_S):
        survivors = ", ".join(str(process.pid) for process in find())
        raise BenchboxError(
            f"process {survivors} cannot be killed and would compete with the next measurement for the machine; "
            "it is stuck in the kernel, which often takes a reset of its device"
        )


def _signal_all(number: signal.Signals, find: Callable[[], list[psutil.Process]], limit_s: float) -> bool:
    """Signal every process of a job once, including those that appear meanwhile; return whether all ended in time."""
    deadline = time.monotonic() + limit_s
    signalled: set[psutil.Process] = set()  # psutil compares processes by pid and creation time
    while alive := find():
        for process in alive:
            if process not in signalled:
                signalled.add(process)
                _send(process, number)
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def signal_processes(job_id: str, pids: Collection[int], number: int, *, session: int | None = None) -> None:
    """Signal the processes of a job that have these ids: the kernel may have given the id of a dead rank to another process."""
    for process in find_processes(job_id, session=session):
        if process.pid in pids:
            _send(process, number)


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):  # it may have ended in between
        process.send_signal(number)
