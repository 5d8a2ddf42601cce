"""Arrival of a rank at every collective of the timed steps, and the time it is blocked in them.

Arrivals come from torch's flight recorder, which notes the creation of every collective, also by DDP's reducer in C++. Blocked
time is that of `Work.wait`. DDP waits in C++ at the end of its backward pass: there a rank is blocked from its last
collective to the end of the phase. Clocks of ranks on one host are the same; `benchbox.store.step_split` compares them.

It costs some microseconds a collective. Streams wait for the collectives of CUDA devices, so these are not recorded.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist

from benchbox.measure.phases import CallbackContext, ContextInstrument
from benchbox.registry.phases import PHASES

if TYPE_CHECKING:
    from benchbox.store.rank_result import BlockedTime, CollectiveTimes

_BUFFER = "TORCH_FR_BUFFER_SIZE"
_ENTRIES = 20_000  # of the ring buffer: 500 collectives in each of 40 steps
_SCHEDSTAT = "/proc/thread-self/schedstat"  # of the main thread, which opens it: CPU time and time on the run queue, in ns
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_SINGLE = "there is one rank"
_CUDA = "streams wait for collectives on a CUDA device, the host does not"
_NO_RECORDER = "this version of torch does not record collectives on a CPU"
_OVERFLOW = f"there were more collectives than torch records: {_BUFFER} in the environment sets how many"


def enable_recording() -> None:
    """Make torch record the collectives of this process; to be called before its first process group exists."""
    if not torch.cuda.is_available():
        os.environ.setdefault(_BUFFER, str(_ENTRIES))


class CollectiveClock(ContextInstrument):
    """Instrument that notes when steps and phases begin and end, when this rank waits, and how long it lacked a core."""

    def __init__(self, device: torch.device) -> None:
        self.reason: str | None = None
        if not dist.is_initialized() or dist.get_world_size() == 1:
            self.reason = _SINGLE
        elif device.type == "cuda":
            self.reason = _CUDA
        self._steps: list[tuple[int, int]] = []  # ns of the system's clock, as in the flight recorder
        self._intervals: list[tuple[int, str, int, int]] = []  # of phases: step, name, start, end
        self._waits: list[tuple[int, int]] = []
        self._core_waits_ns: list[int] = []
        self._schedstat = _open_schedstat()
        self._step_start = self._phase_start = 0
        self._queued_ns = self._data_queued_ns = (
            0  # on the run queue: before the step and in its waits; before the wait for data
        )
        self._step = CallbackContext(self._begin_step, self._end_step)
        self._phases = {name: self._context(name) for name in PHASES}

    def __enter__(self) -> Self:
        """Begin to time `Work.wait`."""
        if self.reason is None:
            self._original = dist.Work.wait
            dist.Work.wait = self._timed_wait(dist.Work.wait)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        if self.reason is None:
            dist.Work.wait = self._original  # type: ignore[method-assign]

    def result(self) -> tuple[CollectiveTimes | None, str | None]:
        """Return the times of the completed steps, or the reason why there are none."""
        if self.reason is not None:
            return None, self.reason
        entries = _read_recorder()
        if not entries or not self._steps:
            return None, _NO_RECORDER
        if len(entries) >= int(os.environ.get(_BUFFER, "0")) and entries[0][1] > self._steps[0][0]:
            return None, _OVERFLOW
        arrivals = [[entry for entry in entries if start <= entry[1] <= end] for start, end in self._steps]
        times: CollectiveTimes = {
            "clock": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None,
            "steps": [list(step) for step in self._steps],
            "arrivals": [[[key, at] for key, at in step] for step in arrivals],
            "blocked": [self._blocked(number, arrivals[number]) for number in range(len(self._steps))],
            "core_wait_s": [ns / 1e9 for ns in self._core_waits_ns] if self._schedstat is not None else None,
        }
        return times, None

    def _blocked(self, number: int, arrivals: list[tuple[str, int]]) -> list[BlockedTime]:
        """Return the intervals of a step in which the rank was blocked, in the order of the phases."""
        blocked: list[BlockedTime] = []
        for step, name, start, end in self._intervals:
            if step != number:
                continue
            waits = [[begin, done] for begin, done in self._waits if start <= begin <= end]
            created = [at for _, at in arrivals if start <= at <= end]
            if waits:
                blocked += [{"start": begin, "end": done, "until": "completion"} for begin, done in waits]
            elif created:  # its end is known only where nothing but the end of the phase follows
                until: Literal["arrival", "completion"] = "completion" if name == "backward" else "arrival"
                blocked.append({"start": max(created), "end": end, "until": until})
        return blocked

    def _timed_wait(self, original: Any) -> Any:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            queued_ns, start = self._run_queue_ns(), time.time_ns()
            try:
                return original(work, *args, **kwargs)
            finally:
                self._waits.append((start, time.time_ns()))
                self._queued_ns += self._run_queue_ns() - queued_ns  # of the wait, not of the rank's own work

        return wait

    def _context(self, name: str) -> CallbackContext:
        def leave(failed: bool) -> None:
            if not failed:
                self._intervals.append((len(self._steps), name, self._phase_start, time.time_ns()))

        def leave_data_wait(failed: bool) -> None:
            self._queued_ns += self._run_queue_ns() - self._data_queued_ns
            leave(failed)

        if name == "data_wait":
            return CallbackContext(self._begin_data_wait, leave_data_wait)
        return CallbackContext(self._begin_phase, leave)

    def _begin_data_wait(self) -> None:
        self._data_queued_ns = self._run_queue_ns()
        self._begin_phase()

    def _begin_phase(self) -> None:
        self._phase_start = time.time_ns()

    def _begin_step(self) -> None:
        self._queued_ns = self._run_queue_ns()
        self._step_start = time.time_ns()

    def _end_step(self, failed: bool) -> None:
        if not failed:
            self._steps.append((self._step_start, time.time_ns()))
            self._core_waits_ns.append(self._run_queue_ns() - self._queued_ns)

    def _run_queue_ns(self) -> int:
        """Return the time that this thread was ready to run and had no core, since it began."""
        return 0 if self._schedstat is None else int(os.pread(self._schedstat, 128, 0).split()[1])


def _open_schedstat() -> int | None:
    with suppress(OSError, IndexError, ValueError):
        descriptor = os.open(_SCHEDSTAT, os.O_RDONLY)
        int(os.pread(descriptor, 128, 0).split()[1])
        return descriptor
    return None


def _read_recorder() -> list[tuple[str, int]]:
    """Return (collective, time of creation in ns) from the oldest on. A collective has one name on all ranks of its group."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # noqa: SLF001 (torch has no public reader)
    if dump is None:
        return []
    trace = json.loads(dump(includeCollectives=True, onlyActive=False))
    groups = {name: config.get("ranks", name) for name, config in trace.get("pg_config", {}).items()}
    return sorted(
        (
            (
                f"{groups.get(entry['process_group'][0])}/{entry['process_group'][1]}/{entry['collective_seq_id']}",
                int(entry["time_created_ns"]),
            )
            for entry in trace.get("entries", [])
            if not entry["is_p2p"]
        ),
        key=lambda entry: entry[1],
    )
