"""Limits of Linux's control groups, versions 1 and 2: usable cores and memory, and time in which a quota was used up."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = ("max", "-1")


def usable_cores() -> int:
    """Return the number of cores this process may use, in a container or a Slurm step fewer than the machine has.

    A quota counts as the whole cores whose time it is: with more threads, all of them would wait in each period.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(math.floor, _quotas())]))


def usable_memory_bytes() -> int:
    """Return the memory that this process may use, in a container or a job of Slurm less than the machine has."""
    import psutil

    limits = [_read(folder / name) for folder in _folders("memory") for name in ("memory.max", "memory.limit_in_bytes")]
    total: int = psutil.virtual_memory().total
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def quota_throttled_s() -> float | None:
    """Return how long CPUs have waited for a quota of this process's control groups; None where no group counts it."""
    times_s = list(_throttled_s())
    return sum(times_s) if times_s else None


def _quotas() -> Iterator[float]:
    """Yield the quotas that hold for this process, in cores."""
    for folder in _folders():
        limit = _read(folder / "cpu.max") or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        quota, _, period = limit.partition(" ")
        if period and quota not in _UNLIMITED:
            yield int(quota) / int(period)


def _throttled_s() -> Iterator[float]:
    for folder in _folders():
        fields = dict(line.split() for line in _read(folder / "cpu.stat").splitlines())
        if "throttled_usec" in fields:
            yield int(fields["throttled_usec"]) / 1e6
        elif "throttled_time" in fields:
            yield int(fields["throttled_time"]) / 1e9


def _folders(controller: str = "cpu") -> list[Path]:
    """Return the folders of this process's control groups for a controller and of the groups around them, each once.

    In a container, paths of groups may be those of the host, and its own group is the root.
    """
    folders = [_ROOT, _ROOT / controller]
    for line in _read(_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount, parts = _ROOT / controller if controllers else _ROOT, Path(path).parts[1:]
        if ".." not in parts:  # a group outside the container
            folders += [mount.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def _read(path: Path) -> str:
    """Return the text of a file of the kernel; empty where it cannot be read."""
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""
