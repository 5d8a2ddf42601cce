"""Ranks and memory that this machine has."""

from __future__ import annotations

from benchbox.measure.control_groups import usable_cores

# A rank needs a core to itself for times that mean something. A matrix for more ranks than cores can still be tried out, with
# a few ranks on each core; beyond that, ranks only wait for each other, and their memory ends the machine before they step.
RANKS_PER_CORE = 8


def device_memory_bytes() -> int | None:
    """Return the memory of the smallest NVIDIA device of this machine, by NVML; None where it does not say.

    Written from NVML's documentation: it has not been run on a device.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return min((int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles), default=None)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def capacity_refusal(ranks: int) -> str | None:
    """Return why this machine cannot run a group of so many ranks, or None. Ranks without a GPU of their own refuse later."""
    cores = usable_cores()
    if ranks <= RANKS_PER_CORE * cores:
        return None
    return (
        f"{ranks} ranks are more than {RANKS_PER_CORE * cores}, {RANKS_PER_CORE} for each of the {cores} usable cores of this "
        "machine: they would do little but wait for a core; take fewer"
    )
