"""The process of one rank: its log, heartbeat and final event around the job it runs.

Nothing heavy is imported before the log is open and the first event written, so that even a failing import is reported as a
typed result of this rank.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from benchbox.store.events import EventWriter
from benchbox.store.rank_state import RankStateFile
from benchbox.worker.collective_log import write_collectives
from benchbox.worker.output import redirect_output
from benchbox.worker.parent import signal_on_parent_death
from benchbox.worker.reporting import describe_error
from benchbox.worker.stop_signals import LAUNCHER_VARIABLE, StopSignals

if TYPE_CHECKING:
    from benchbox.measure.phases import ProgressTracker
    from benchbox.worker.job_file import JobConfig

_HEARTBEAT_S = 1.0


def run_rank(job_file: str) -> NoReturn:
    """Run the job and end the process: exit code 0 on success, else 1. Unless it is killed, it writes a final event."""
    job: Any = json.loads(Path(job_file).read_text())
    rank = int(os.environ.get("RANK", "0"))
    out = Path(job["out"])
    redirect_output(out / f"rank{rank}.log")
    faulthandler.enable()  # a crash in C code writes the Python stacks to the log
    events = EventWriter(out / f"events-rank{rank}.jsonl", rank)
    signal_on_parent_death(signal.SIGKILL)
    collectives = out / f"collectives-rank{rank}.json"
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    signals = StopSignals(
        events,
        launcher=None if launcher is None else int(launcher),
        handles_usr1=job["kind"] == "train",
        before_end=lambda: _try_to_write_collectives(collectives),
    )
    stack = _dump_stacks_on_sigusr2(out / f"stack-rank{rank}.txt")
    events.write("start", pid=os.getpid())

    from benchbox.measure.phases import ProgressTracker

    tracker = ProgressTracker(on_change=RankStateFile(out / f"state-rank{rank}").write)
    _start_heartbeat(tracker, events, stack, collectives)
    try:
        _run_job(job, out, rank, tracker, events, signals)
    except BaseException as error:  # noqa: BLE001 (every failure is reported as the result of this rank)
        description = describe_error(error, tracker.state)
        _try_to_write_collectives(collectives)
        events.write("error", **description)
        traceback.print_exc()
        _exit_at_once(1)  # destroying the process group may hang when another rank has died
    events.write_last("done")
    _skip_torch_finalizers()
    atexit._run_exitfuncs()  # noqa: SLF001 (no public name; an auditor in this process writes its report there)
    _exit_at_once(0)


def _exit_at_once(code: int) -> NoReturn:
    """End without finalizing the interpreter, which takes seconds with torch loaded: all results are on disk."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _skip_torch_finalizers() -> None:
    """Let the operators that torch registered stay registered: removal takes 50 ms and writes to 33 MB of shared memory."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        if (target := finalizer.peek()) is not None and target[1].__module__ == "torch.library":
            finalizer.atexit = False


def _run_job(job: JobConfig, out: Path, rank: int, tracker: ProgressTracker, events: EventWriter, signals: StopSignals) -> None:
    from benchbox.worker.group import leave_hangs_to_launcher

    leave_hangs_to_launcher()
    if job["kind"] == "train":
        from benchbox.worker.training import train

        _exempt_from_collection()
        train(job, rank, tracker, events, signals)
    elif job["kind"] == "links":
        from benchbox.worker.measuring_links import measure_links

        measure_links(job, out, rank, tracker, events)
    elif job["kind"] == "peaks":
        from benchbox.worker.measuring_peaks import measure_peaks

        measure_peaks(job, out, rank, tracker, events)
    elif job["kind"] == "profile":
        from benchbox.worker.profiling import profile

        _exempt_from_collection()
        profile(job, out, rank, tracker, events)
    else:
        from benchbox.worker.measuring import measure

        _exempt_from_collection()
        measure(job, out, rank, tracker, events)

    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _exempt_from_collection() -> None:
    """Keep garbage collections from visiting what was imported: 0.2 s in whatever step they fall, under any launcher."""
    gc.freeze()


def _dump_stacks_on_sigusr2(path: Path) -> int:
    """Let SIGUSR2, which the launcher sends to a stuck rank, dump the stacks of all threads, even while in C code.

    Return the descriptor of the file, which is empty until then.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    return file


def _start_heartbeat(tracker: ProgressTracker, events: EventWriter, stack: int, collectives: Path) -> None:
    """Start a thread that writes the state of the main thread as an event every second.

    Once the launcher has asked for the stacks, it also writes the last collectives, which faulthandler cannot.
    """

    def write_heartbeats() -> None:
        has_written = False
        while True:
            with suppress(OSError):  # of a full disk, which may have room again
                events.write("heartbeat", **tracker.state._asdict())
            if not has_written and os.fstat(stack).st_size:
                has_written = True
                _try_to_write_collectives(collectives)
            time.sleep(_HEARTBEAT_S)

    threading.Thread(target=write_heartbeats, name="heartbeat", daemon=True).start()


def _try_to_write_collectives(path: Path) -> None:
    """Write the last collectives of this rank. An error here must not hide that of the launch."""
    try:
        write_collectives(path)
    except Exception:  # noqa: BLE001 (whatever torch's recorder raises)
        traceback.print_exc()
