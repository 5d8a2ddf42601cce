"""NVIDIA GPUs by their device files, for a fork server: NVML must not be initialised before ranks are forked.

With driver 580, NVML starts a thread when it is initialised and opens the file of the CUDA driver (measured on an H200).
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICES = Path("/dev")
CUDA_DRIVER_FILE = "/dev/nvidia-uvm"


def count_device_files() -> int:
    """Return the number of NVIDIA GPUs that have a device file."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in DEVICES.glob("nvidia[0-9]*"))


@contextmanager
def counting_by_files() -> Iterator[None]:
    """Let torch count GPUs by device files inside the with block, and DeepSpeed import NVML without initialising it.

    UUIDs in CUDA_VISIBLE_DEVICES are counted as they are: torch would ask NVML, and about MIG devices the CUDA driver.
    Nothing is replaced where there is no GPU.
    """
    count = count_device_files()
    if not count:
        yield
        return
    import pynvml
    import torch

    count_by_nvml, initialise = torch.cuda._device_count_nvml, pynvml.nvmlInit  # noqa: SLF001 (torch has no public name)
    torch.cuda._device_count_nvml, pynvml.nvmlInit = lambda: _count_visible(count), lambda: None  # noqa: SLF001
    try:
        yield
    finally:
        torch.cuda._device_count_nvml, pynvml.nvmlInit = count_by_nvml, initialise  # noqa: SLF001


def _count_visible(count: int) -> int:
    """Return how many of `count` GPUs the environment lets a process see: those before the first number beyond them."""
    import torch

    visible = torch.cuda._parse_visible_devices()  # noqa: SLF001 (torch has no public name)
    return next((index for index, name in enumerate(visible) if isinstance(name, int) and name >= count), len(visible))


def initialise_nvml() -> None:
    """Initialise NVML in a forked rank, if DeepSpeed was imported and relies on it."""
    if "deepspeed" in sys.modules and count_device_files():
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()


def opened_files() -> set[str]:
    """Return the paths of the files that this process has open."""
    files = set()
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # it is closed by now
            files.add(str(descriptor.readlink()))
    return files
