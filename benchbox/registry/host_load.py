"""Criteria of a busy host, read from a launch record."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.registry.launch_record import LaunchRecord

# On a quiet host the launcher and torchrun, which count as other processes, use 0.4 % of one core (measured on CPU), and the
# difference of sampled ticks and exact times may be off by some percent. A process that competes with ranks on all cores gets
# much more: half a core is 25 % of 2 cores.
BUSY_CPU_SHARE = 0.10
BUSY_STEAL_SHARE = 0.05
BUSY_DEVICE_SHARE = 0.05
BUSY_QUOTA_SHARE = 0.05

BUSY_FORMULA = (
    f"during the measured steps, processes that are not of the launch used at least {BUSY_CPU_SHARE:.0%} of the CPU time of "
    "all cores ((busy time - time of the ranks and their children) / (duration x cores)), the hypervisor took at least "
    f"{BUSY_STEAL_SHARE:.0%} of it, the launch waited for a CPU quota for at least {BUSY_QUOTA_SHARE:.0%} of the CPU time that "
    f"it used, or other processes used at least {BUSY_DEVICE_SHARE:.0%} of a GPU"
)


def busy_reasons(record: LaunchRecord) -> tuple[str, ...]:
    """Return why a launch ran on a busy host, one clause per cause; empty on a quiet host and where the state is unknown."""
    return tuple(_reasons(record))


def may_be_busy(record: LaunchRecord) -> bool:
    """Return whether a launch ran on a busy host, or recorded its host without learning what other processes used.

    False for records from before hosts were recorded.
    """
    state = record.get("host")
    unknown = state is not None and any(host["other_cpu_share"] is None for host in state["hosts"])
    return unknown or bool(busy_reasons(record))


def _reasons(record: LaunchRecord) -> Iterator[str]:
    state = record.get("host")
    if not state:
        return
    for number, host in enumerate(state["hosts"]):
        name = f"host {number}: " if len(state["hosts"]) > 1 else ""
        share, steal = host["other_cpu_share"], host["steal_share"]
        if share is not None and share >= BUSY_CPU_SHARE:
            yield f"{name}other processes used {share:.0%} of the CPU time"
        if steal is not None and steal >= BUSY_STEAL_SHARE:
            yield f"{name}the hypervisor took {steal:.0%} of the CPU time"
        used_s = (host["launch_cpu_share"] or 0.0) * host["window_s"] * host["cores"]
        throttled_s = host["quota_throttled_s"] or 0.0
        if used_s and throttled_s >= BUSY_QUOTA_SHARE * used_s:
            yield f"{name}the launch waited {throttled_s:.3g} s for a CPU quota, and used {used_s:.3g} s of CPU time"
    for device in state["devices"] or []:
        share = device["other_utilisation"]
        if share is not None and share >= BUSY_DEVICE_SHARE:
            yield f"other processes used {share:.0%} of the GPU of rank {device['rank']}"
