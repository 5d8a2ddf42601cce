"""State of the host over the measured steps: CPU time by whom, load, frequency, throttling, and the device through NVML.

Counters are read before and after the steps. Nothing runs in between.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil
import torch

from benchbox.measure.control_groups import quota_throttled_s
from benchbox.measure.nvml import DeviceWindow, open_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.registry.launch_record import StartEnd
    from benchbox.store.rank_result import HostCounters, RankHost

_Value = TypeVar("_Value")

_CPUS = Path("/sys/devices/system/cpu")
_NO_NVIDIA = "the rank does not train on an NVIDIA device"


class HostWindow:
    """Counters of this rank's host and device from the creation of the object until `close`.

    Every rank counts its CPU time and its device; the rest of the host is counted by local rank 0 alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._device: DeviceWindow | None = None
        self._device_reason: str | None = _NO_NVIDIA
        if device.type == "cuda" and torch.version.cuda:
            self._device, self._device_reason = open_device(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        self._host = read_host() if self._local_rank == 0 else None
        self._cpu_s = tree_cpu_s()

    def close(self, rank: int) -> RankHost:
        """Return what changed since the creation. To be called once, after the device has finished the steps."""
        cpu_s = tree_cpu_s() - self._cpu_s
        return {
            "local_rank": self._local_rank,
            "cpu_s": cpu_s,
            "counters": count(self._host, read_host()) if self._host else None,
            "device": self._device.close(rank) if self._device else None,
            "device_reason": self._device_reason,
        }


@dataclass(frozen=True, slots=True)
class HostReading:
    """Counters of the host at one moment; None where the kernel does not tell."""

    time_s: float
    busy_s: float | None
    steal_s: float | None
    load_average: float | None
    frequency_mhz: float | None
    throttle_events: int | None
    quota_throttled_s: float | None


def read_host() -> HostReading:
    """Read the counters of the host once."""
    busy_s = steal_s = None
    with suppress(OSError, psutil.Error):
        times = psutil.cpu_times()
        busy_s = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
        steal_s = getattr(times, "steal", None)
    frequency = _optional(psutil.cpu_freq)
    load_average = _optional(os.getloadavg)
    return HostReading(
        time_s=time.monotonic(),
        busy_s=busy_s,
        steal_s=steal_s,
        load_average=load_average[0] if load_average else None,
        frequency_mhz=frequency.current if frequency else None,
        throttle_events=_throttle_events(),
        quota_throttled_s=_optional(quota_throttled_s),
    )


def count(start: HostReading, end: HostReading) -> HostCounters:
    """Return the difference of two readings, with a reason for everything that the kernel does not tell."""
    counters: HostCounters = {
        "window_s": end.time_s - start.time_s,
        "cores": psutil.cpu_count() or 1,
        "busy_s": _difference(start.busy_s, end.busy_s),
        "steal_s": _difference(start.steal_s, end.steal_s),
        "load_average": _start_end(start.load_average, end.load_average),
        "frequency_mhz": _start_end(start.frequency_mhz, end.frequency_mhz),
        "thermal_throttle_events": None,
        "quota_throttled_s": _difference(start.quota_throttled_s, end.quota_throttled_s),
        "reasons": {},
    }
    if start.throttle_events is not None and end.throttle_events is not None:
        counters["thermal_throttle_events"] = end.throttle_events - start.throttle_events
    reasons = {
        "busy_s": "the system does not count CPU time",
        "steal_s": "the system does not count steal",
        "load_average": "the system has no load average",
        "frequency_mhz": "the kernel does not tell the CPU frequency",
        "thermal_throttle_events": "the kernel has no thermal_throttle counters",
        "quota_throttled_s": "no cpu.stat of a control group counts throttling",
    }
    counters["reasons"] = {key: reason for key, reason in reasons.items() if counters.get(key) is None}
    return counters


def tree_cpu_s() -> float:
    """Return the CPU time of this process, its living children and those that have ended."""
    process = psutil.Process()
    total = 0.0
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):  # ended in between: then its parent counts its time
            times = member.cpu_times()
            total += times.user + times.system
            total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


def _read_text(path: Path) -> str:
    """Return the text of a file of the kernel; empty where it cannot be read."""
    return _optional(lambda: path.read_text(encoding="ascii", errors="replace")) or ""


def _throttle_events() -> int | None:
    texts = [_read_text(path).strip() for path in _CPUS.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")]
    return sum(int(text) for text in texts) if texts and all(text.isdigit() for text in texts) else None


def _optional(read: Callable[[], _Value]) -> _Value | None:
    try:
        return read()
    except (OSError, ValueError, NotImplementedError, psutil.Error):
        return None


def _difference(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _start_end(start: float | None, end: float | None) -> StartEnd | None:
    return None if start is None and end is None else {"start": start, "end": end}
