"""Values read through NVML. A stand-in for the library gives them; the code has not run on a device."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pynvml
import pytest

from benchbox.measure.nvml import THROTTLE_REASONS, open_device

STRANGER = 2**22 + 1
GIB = 2**30


class FakeNVML:
    """A device that this process shares with another one. `missing` are functions that it does not support."""

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = "sm", "mem", "gpu"

    def __init__(self, missing=(), pids=None):
        self.opened = 0
        self.pids = pids or (os.getpid(), STRANGER)
        self.energies = iter([1_000_000, 1_042_000])
        self.throttle = iter([0x4, 0x40 | 0x400])
        for name in missing:
            setattr(self, name, self.refuse)

    def refuse(self, *arguments):
        raise pynvml.NVMLError_NotSupported

    def nvmlInit(self):  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self):  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid != "GPU-1":
            raise pynvml.NVMLError_NotFound
        return "device"

    def nvmlDeviceGetClockInfo(self, device, clock):  # noqa: N802
        return {"sm": 1980, "mem": 3201}[clock]

    def nvmlDeviceGetPowerUsage(self, device):  # noqa: N802
        return 612_500

    def nvmlDeviceGetTemperature(self, device, sensor):  # noqa: N802
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device):  # noqa: N802
        return next(self.throttle)

    def nvmlDeviceGetTotalEnergyConsumption(self, device):  # noqa: N802
        return next(self.energies)

    def nvmlDeviceGetUtilizationRates(self, device):  # noqa: N802
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetComputeRunningProcesses(self, device):  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=(number + 1) * GIB) for number, pid in enumerate(self.pids)]

    def nvmlDeviceGetProcessUtilization(self, device, since_us):  # noqa: N802
        shares = [(pid, since_us + 1, 20 * (number + 1)) for number, pid in enumerate(self.pids)]
        shares += [(STRANGER, since_us + 2, 60), (STRANGER, since_us - 1, 100)]
        return [SimpleNamespace(pid=pid, timeStamp=time_us, smUtil=share) for pid, time_us, share in shares]


@pytest.fixture
def observe(monkeypatch):
    def run(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        window, reason = open_device("GPU-1")
        assert reason is None
        record = window.close(3)
        assert nvml.opened == 0
        return record

    return run


def test_values_have_the_units_of_the_record(observe):
    assert observe(FakeNVML()) == {
        "rank": 3,
        "utilisation": 0.97,
        "other_processes": 1,
        "other_memory_bytes": 2 * GIB,
        "other_utilisation": pytest.approx(0.5),  # the mean of 40 and 60; the sample of before the steps does not count
        "sm_clock_mhz": {"start": 1980, "end": 1980},
        "memory_clock_mhz": {"start": 3201, "end": 3201},
        "power_w": {"start": 612.5, "end": 612.5},
        "temperature_c": {"start": 61, "end": 61},
        "throttle_reasons": ["SwPowerCap", "HwThermalSlowdown", "0x400"],
        "energy_j": 42.0,
        "reasons": {},
    }


def test_a_device_of_our_own_has_no_other_processes(observe):
    record = observe(FakeNVML(pids=(os.getpid(),), missing=["nvmlDeviceGetProcessUtilization"]))
    assert (record["other_processes"], record["other_memory_bytes"]) == (0, 0)
    assert record["reasons"] == {"other_utilisation": "NVML: Not Supported"}


def test_what_a_device_does_not_support_is_null_with_the_drivers_reason(observe):
    functions = [name for name in vars(FakeNVML) if name.startswith("nvmlDeviceGet") and not name.endswith("UUID")]
    record = observe(FakeNVML(missing=functions))
    unknown = [key for key, value in record.items() if value is None]
    assert set(record) - set(unknown) == {"rank", "reasons"}
    assert record["reasons"] == dict.fromkeys(unknown, "NVML: Not Supported")


def test_process_numbers_of_another_namespace_are_not_taken_for_strangers(observe):
    record = observe(FakeNVML(pids=(STRANGER,)))
    assert record["other_processes"] is record["other_memory_bytes"] is record["other_utilisation"] is None
    assert all("process namespace" in reason for reason in record["reasons"].values())


def test_without_a_driver_there_is_a_reason_and_no_device():
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert open_device("GPU-1") == (None, "NVML: NVML Shared Library Not Found")
    else:
        pytest.skip("this machine has a driver")


def test_an_unknown_device_has_a_reason_and_nvml_is_released(monkeypatch):
    nvml = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert open_device("GPU-2") == (None, "NVML: Not Found")
    assert nvml.opened == 0


def test_the_bits_of_throttle_reasons_are_those_of_nvml():
    for bit, name in THROTTLE_REASONS.items():
        assert getattr(pynvml, f"nvmlClocksThrottleReason{name}") == bit


class Warming(FakeNVML):
    """A device whose clocks, power and temperature change between the two readings."""

    def __init__(self):
        super().__init__()
        self.clocks, self.powers, self.temperatures = iter([1980, 3201, 1410, 2619]), iter([612_500, 300_000]), iter([50, 61])

    def nvmlDeviceGetClockInfo(self, device, clock):  # noqa: N802
        return next(self.clocks)

    def nvmlDeviceGetPowerUsage(self, device):  # noqa: N802
        return next(self.powers)

    def nvmlDeviceGetTemperature(self, device, sensor):  # noqa: N802
        return next(self.temperatures)


def test_a_state_has_what_was_read_first_as_its_start(observe):
    record = observe(Warming())
    assert record["sm_clock_mhz"] == {"start": 1980, "end": 1410}
    assert record["memory_clock_mhz"] == {"start": 3201, "end": 2619}
    assert record["power_w"] == pytest.approx({"start": 612.5, "end": 300.0})
    assert record["temperature_c"] == {"start": 50, "end": 61}
