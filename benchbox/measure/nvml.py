"""State of one NVIDIA device over the measured steps, read through NVML.

Tested with a stand-in for the library, and run on an H200 (driver 580), where every value was there.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.registry.launch_record import DeviceRecord, StartEnd

# Bits of nvmlClocksThrottleReasons.
THROTTLE_REASONS = {
    0x1: "GpuIdle",
    0x2: "ApplicationsClocksSetting",
    0x4: "SwPowerCap",
    0x8: "HwSlowdown",
    0x10: "SyncBoost",
    0x20: "SwThermalSlowdown",
    0x40: "HwThermalSlowdown",
    0x80: "HwPowerBrakeSlowdown",
    0x100: "DisplayClockSetting",
}
_HIDDEN_PROCESSES = "this process is not among those that the driver lists: it runs in a process namespace of its own"


def open_device(uuid: str) -> tuple[DeviceWindow | None, str | None]:
    """Start to observe the device with this UUID; return None and a reason where NVML is not usable."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        return None, f"NVML: {error}"
    return DeviceWindow(pynvml, handle), None


class DeviceWindow:
    """Counters of one device from the creation of the object until `close`."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._reasons: dict[str, str] = {}
        self._start_us = time.time_ns() // 1000
        self._start = self._read()

    def close(self, rank: int) -> DeviceRecord:
        """Return what was observed since the creation, and release NVML."""
        start, end = self._start, self._read()
        rates = self._optional("utilisation", self._nvml.nvmlDeviceGetUtilizationRates)
        processes = self._other_processes()
        energy = None if start["energy_j"] is None or end["energy_j"] is None else (end["energy_j"] - start["energy_j"]) / 1e3
        record: DeviceRecord = {
            "rank": rank,
            "utilisation": None if rates is None else rates.gpu / 100,
            "other_processes": None if processes is None else len(processes),
            "other_memory_bytes": self._memory(processes),
            "other_utilisation": self._other_utilisation(),
            "sm_clock_mhz": _start_end(start["sm_clock_mhz"], end["sm_clock_mhz"]),
            "memory_clock_mhz": _start_end(start["memory_clock_mhz"], end["memory_clock_mhz"]),
            "power_w": _start_end(start["power_w"], end["power_w"], scale=1e-3),
            "temperature_c": _start_end(start["temperature_c"], end["temperature_c"]),
            "throttle_reasons": _throttle_reasons(start["throttle_reasons"], end["throttle_reasons"]),
            "energy_j": energy,
            "reasons": self._reasons,
        }
        self._nvml.nvmlShutdown()
        return record

    def _read(self) -> dict[str, Any]:
        nvml = self._nvml
        return {
            "sm_clock_mhz": self._optional("sm_clock_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._optional("memory_clock_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            "power_w": self._optional("power_w", nvml.nvmlDeviceGetPowerUsage),  # mW
            "temperature_c": self._optional("temperature_c", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": self._optional("throttle_reasons", nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
            "energy_j": self._optional("energy_j", nvml.nvmlDeviceGetTotalEnergyConsumption),  # mJ
        }

    def _optional(self, key: str, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            self._reasons[key] = f"NVML: {error}"
            return None

    def _other_processes(self) -> list[Any] | None:
        """Return the processes on the device that are not this one; None where their numbers mean nothing here."""
        processes = self._optional("other_processes", self._nvml.nvmlDeviceGetComputeRunningProcesses)
        if processes is None:
            return None
        if all(process.pid != os.getpid() for process in processes):
            self._reasons["other_processes"] = _HIDDEN_PROCESSES
            return None
        return [process for process in processes if process.pid != os.getpid()]

    def _memory(self, processes: list[Any] | None) -> int | None:
        if processes is None:
            self._reasons["other_memory_bytes"] = self._reasons["other_processes"]
            return None
        sizes: list[int | None] = [process.usedGpuMemory for process in processes]
        known_sizes = [size for size in sizes if size is not None]
        if len(known_sizes) < len(sizes):
            self._reasons["other_memory_bytes"] = "the driver does not tell the memory of every process"
            return None
        return sum(known_sizes)

    def _other_utilisation(self) -> float | None:
        """Return the sum over other processes of their mean share of the multiprocessors since the start."""
        samples = self._optional("other_utilisation", self._nvml.nvmlDeviceGetProcessUtilization, self._start_us)
        if samples is None:
            return None
        shares: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp >= self._start_us:
                shares.setdefault(sample.pid, []).append(sample.smUtil)
        if os.getpid() not in shares:
            self._reasons["other_utilisation"] = _HIDDEN_PROCESSES
            return None
        return sum(sum(values) / len(values) for pid, values in shares.items() if pid != os.getpid()) / 100


def _throttle_reasons(start: int | None, end: int | None) -> list[str] | None:
    if start is None or end is None:
        return None
    bits = start | end
    named = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    unnamed = bits & ~sum(THROTTLE_REASONS)
    return [*named, hex(unnamed)] if unnamed else named


def _start_end(start: float | None, end: float | None, scale: float = 1) -> StartEnd | None:
    if start is None and end is None:
        return None
    return {"start": None if start is None else start * scale, "end": None if end is None else end * scale}
