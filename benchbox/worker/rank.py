"""One rank's process: its log, its heartbeat, its end. What it works at is the job's business.

Nothing heavy is imported before the log is in place and the first event written, so that even an import that fails is a typed
result of this rank.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from benchbox.errors import BenchboxError
from benchbox.store.events import EventWriter
from benchbox.store.rank_state import RankStateFile

if TYPE_CHECKING:
    from benchbox.measure.phases import Position

_HEARTBEAT_S = 1.0
_PR_SET_PDEATHSIG = 1


def run_rank(job_file: str) -> NoReturn:
    """Work at the job and end the process, with 0 if all went well. Unless killed from outside it leaves a last event."""
    job = json.loads(Path(job_file).read_text())
    rank = int(os.environ.get("RANK", "0"))
    out = Path(job["out"])
    _log_to(out / f"rank{rank}.log")
    events = EventWriter(out / f"events-rank{rank}.jsonl", rank)
    _die_with_parent()
    _say_when_terminated(events)
    _dump_stack_when_asked(out / f"stack-rank{rank}.txt")
    events.write("start", pid=os.getpid())

    from benchbox.measure.phases import Position

    position = Position(keep=RankStateFile(out / f"state-rank{rank}").write)
    _beat(position, events)
    try:
        _work(job, rank, position, events)
    except BaseException as error:  # noqa: BLE001 (a failure is this rank's result, whatever it is)
        events.write("error", **_described(error, position))
        traceback.print_exc()
        _leave(1)  # the process group may hang on its way down when a peer is gone
    events.write("done")
    atexit._run_exitfuncs()  # noqa: SLF001 (of who watches from outside, say; there is no public name)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End at once: all worth keeping is on disk, and taking the interpreter down with all that is loaded takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(job: dict[str, Any], rank: int, position: Position, events: EventWriter) -> None:
    if job["kind"] == "train":
        from benchbox.worker.training import train as work
    else:
        from benchbox.worker.measuring import measure as work
    work(job, rank, position, events)

    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _described(error: BaseException, position: Position) -> dict[str, Any]:
    """An exception as a structure: typed by its class, never by its text."""
    import torch
    import torch.distributed as dist

    state = position.state
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        status = "oom"
    elif isinstance(error, BenchboxError):
        status = error.status
    elif isinstance(error, KeyboardInterrupt):
        status = "interrupted"
    else:
        status = "crash"
    return {
        "status": status,
        "type": type(error).__name__,
        "message": str(error),
        "stage": state.stage,
        "step": state.step,
        "phase": state.phase,
        "traceback": traceback.format_exc(),
        "secondary": isinstance(error, dist.DistError) and not isinstance(error, BenchboxError),
    }


def _log_to(path: Path) -> None:
    """Send everything this process says, C++ included, to its own file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _die_with_parent() -> None:
    """A rank must not outlive the process that started it, however that one ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say_when_terminated(events: EventWriter) -> None:
    """On SIGTERM leave a last word and go. A thread waits for it: the main thread may be deep in a collective that never
    returns to Python, and without a word this rank would look like the one that was killed.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        received = signal.sigwait({signal.SIGTERM})
        events.write("terminated", signal=signal.Signals(received).name)
        os._exit(128 + received)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def _dump_stack_when_asked(path: Path) -> None:
    """On SIGUSR2 write what every thread is doing, even deep in C. The launcher asks a rank that no longer moves."""
    faulthandler.register(signal.SIGUSR2, file=os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), all_threads=True)


def _beat(position: Position, events: EventWriter) -> None:
    """Once a second say where the main thread is."""

    def beat() -> None:
        while True:
            state = position.state
            events.write("heartbeat", **state._asdict())
            time.sleep(_HEARTBEAT_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
