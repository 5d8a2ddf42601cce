"""Ranks and memory that this machine has."""

from __future__ import annotations

import os
from typing import Any

from benchbox.measure.control_groups import usable_cores

# A rank needs a core to itself for times that mean something. A matrix for more ranks than cores can still be tried out, with
# a few ranks on each core; beyond that, ranks only wait for each other, and their memory ends the machine before they step.
RANKS_PER_CORE = 8


def device_memory_bytes() -> int | None:
    """Return the memory of the smallest NVIDIA device that CUDA_VISIBLE_DEVICES shows, by NVML; None where it does not say.

    Written from NVML's documentation: it has not been run on a device.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handles = _visible_devices(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
            return min((int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles), default=None)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _visible_devices(nvml: Any, names: str | None) -> list[Any]:
    """Return handles of the devices that these names show; None shows all. NVML itself knows nothing of visibility.

    Names are numbers, beginnings of UUIDs, or UUIDs of MIG devices. As with CUDA, what follows an unknown one is hidden.
    """
    devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if names is None:
        return devices
    visible: list[Any] = []
    for name in map(str.strip, names.split(",")):
        if name.isdigit():
            matches = devices[int(name) :]
        elif name.startswith("MIG-"):
            matches = [nvml.nvmlDeviceGetHandleByUUID(name)]
        else:
            matches = [device for device in devices if name and nvml.nvmlDeviceGetUUID(device).startswith(name)]
        if not matches:
            break
        visible.append(matches[0])
    return visible


def capacity_refusal(ranks: int) -> str | None:
    """Return why this machine cannot run a group of so many ranks, or None. Ranks without a GPU of their own refuse later."""
    cores = usable_cores()
    if ranks <= RANKS_PER_CORE * cores:
        return None
    return (
        f"{ranks} ranks are more than {RANKS_PER_CORE * cores}, {RANKS_PER_CORE} for each of the {cores} usable cores of this "
        "machine: they would do little but wait for a core; take fewer"
    )


def shared_cores_warning(ranks: int) -> str | None:
    """Return that so many ranks have fewer cores on this machine, or None. Slurm gives a task one core unless it is told."""
    cores = usable_cores()
    if ranks <= cores:
        return None
    remedy = "; a job of Slurm has more by --slurm cpus_per_task" if "SLURM_JOB_ID" in os.environ else ""
    return f"{ranks} ranks share {cores} usable cores of this machine, and wait for one another{remedy}"
