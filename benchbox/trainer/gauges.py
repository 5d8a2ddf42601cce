"""Values in a row of metrics besides the results of the step: epoch, waiting for data, memory, utilisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil

from benchbox.measure.memory import peak_memory, reset_peak_memory
from benchbox.measure.phases import NONE, PHASES, CallbackContext, ContextInstrument, device_timer
from benchbox.measure.rank_times import max_over_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class DataWaitClock(ContextInstrument):
    """Instrument that times how long a step waits for its batches, as `PhaseClock` does. All other phases cost nothing.

    On a CUDA device that is the time in which its stream idled for lack of a batch: the host runs ahead, and waits for the
    next batches while the device is busy.
    """

    def __init__(self, device: torch.device) -> None:
        self._timer = device_timer(device)
        self._waits: list[list[tuple[Any, Any]]] = []  # (start, end) of each wait, by step
        self._start: Any = None
        self._step = CallbackContext(self._begin_step, lambda _: None)
        nothing = {name: NONE.phase(name) for name in PHASES}
        self._phases = nothing | {"data_wait": CallbackContext(self._begin_wait, self._end_wait)}

    def drain(self) -> list[float]:
        """Return the seconds of each step since the last call. Synchronizes with the device once."""
        steps, self._waits = self._waits, []
        if steps and steps[-1]:
            self._timer.synchronize(steps[-1][-1][1])
        return [sum(self._timer.elapsed_s(start, end) for start, end in waits) for waits in steps]

    def _begin_step(self) -> None:
        self._waits.append([])

    def _begin_wait(self) -> None:
        self._start = self._timer.mark()

    def _end_wait(self, _: bool) -> None:
        self._waits[-1].append((self._start, self._timer.mark()))


class TrainingGauges:
    """Values of every row besides the results of its step.

    Args:
        waits: passed to the session as an instrument.
        device: of this rank.
        samples_per_step: of all ranks.
        samples_per_epoch: None if the data has no epochs.
        mfu: the utilisation of steps that take this many seconds, and the reason if it is unknown.
    """

    def __init__(
        self,
        waits: DataWaitClock,
        device: torch.device,
        *,
        samples_per_step: int,
        samples_per_epoch: int | None,
        mfu: Callable[[float], tuple[float | None, str | None]],
    ) -> None:
        self._waits = waits
        self._device = device
        self._samples_per_step = samples_per_step
        self._samples_per_epoch = samples_per_epoch
        self._mfu = mfu
        self._process = psutil.Process()
        self._stated_reason: str | None = None
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Leave out of the next peaks of memory what was done between steps."""
        reset_peak_memory(self._device)

    def read(self, steps: Sequence[int], step_s: float) -> list[dict[str, Any]]:
        """Return the values of each of these steps, which took `step_s` on average. All ranks must call it.

        `epoch` is the number of epochs after the step, a fraction; `data_wait_s` the wait of the rank that waited longest. The
        peaks of memory are those since the last reset, by this call too, on the rank with the highest; `host_rss_bytes`
        is what a rank has in the memory of the host now, without its loader processes. What a device does not count is None.
        `mfu` is that of rank 0; `mfu_reason` is in the first row.
        """
        memory = peak_memory(self._device)
        self.reset_peaks()
        # -1: not counted on this device
        peaks = (-1, -1) if memory is None else (memory["allocated_peak_bytes"] or -1, memory["reserved_peak_bytes"] or -1)
        waits_s = self._waits.drain()
        values = [*waits_s[-len(steps) :], *peaks, self._process.memory_info().rss]
        *waits_s, allocated, reserved, resident = max_over_ranks(values, self._device)
        mfu, reason = self._mfu(step_s)
        common: dict[str, Any] = {
            "allocated_peak_bytes": None if allocated < 0 else int(allocated),
            "reserved_peak_bytes": None if reserved < 0 else int(reserved),
            "host_rss_bytes": int(resident),
            "mfu": mfu,
        }
        rows = [
            {"epoch": self._epoch(step), "data_wait_s": wait_s} | common for step, wait_s in zip(steps, waits_s, strict=True)
        ]
        if reason != self._stated_reason and reason is not None:
            rows[0]["mfu_reason"] = self._stated_reason = reason
        return rows

    def _epoch(self, step: int) -> float | None:
        if self._samples_per_epoch is None:
            return None
        return round((step + 1) * self._samples_per_step / self._samples_per_epoch, 4)
