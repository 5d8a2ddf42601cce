"""Merging what the ranks sampled of their hosts and devices into the host state of a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.registry.launch_record import DeviceRecord, HostRecord, HostState
    from benchbox.store.rank_result import HostCounters, RankHost, RankResult

# The kernel counts CPU time in ticks of 10 ms: a share of fewer than 100 ticks is noise.
MIN_CPU_S = 1.0


def merge_host_state(ranks: Sequence[RankResult]) -> HostState | None:
    """Return the host state of a launch from the results of all ranks in rank order; None when a rank has none."""
    samples = [result["host"] for result in ranks if "host" in result]
    if not samples or len(samples) < len(ranks):
        return None
    devices = [sample["device"] for sample in samples if sample["device"] is not None]
    complete = len(devices) == len(samples)
    return {
        "hosts": _hosts(ranks, samples),
        "devices": devices if complete else None,
        "devices_reason": next((sample["device_reason"] for sample in samples if sample["device_reason"]), None),
        "energy_j_per_sample": _energy_per_sample(devices, sum(result["samples"] for result in ranks)) if complete else None,
    }


def _hosts(ranks: Sequence[RankResult], samples: Sequence[RankHost]) -> list[HostRecord]:
    """Return one record per host. Launchers number ranks host by host, so local rank 0 begins a new one."""
    groups: list[tuple[HostCounters, list[int], list[float]]] = []
    for result, sample in zip(ranks, samples, strict=True):
        if sample["counters"] is not None:
            groups.append((sample["counters"], [], []))
        if groups:
            groups[-1][1].append(result["rank"])
            groups[-1][2].append(sample["cpu_s"])
    return [_host(counters, numbers, sum(cpu_s)) for counters, numbers, cpu_s in groups]


def _host(counters: HostCounters, ranks: list[int], launch_s: float) -> HostRecord:
    capacity_s = counters["window_s"] * counters["cores"]
    reasons = {key: reason for key, reason in counters["reasons"].items() if key not in ("busy_s", "steal_s")}
    launch_share = other_share = steal_share = None
    if capacity_s < MIN_CPU_S:
        reason = f"the kernel counts ticks, too coarse for {counters['window_s']:.2f} s of steps on {counters['cores']} cores"
        reasons |= dict.fromkeys(("launch_cpu_share", "other_cpu_share", "steal_share"), reason)
    else:
        launch_share = launch_s / capacity_s
        busy_s, steal_s = counters["busy_s"], counters["steal_s"]
        if busy_s is None:
            reasons["other_cpu_share"] = counters["reasons"]["busy_s"]
        else:
            # Ticks are sampled and the time of a process is exact, so the difference can be slightly negative.
            other_share = max(0.0, busy_s - launch_s) / capacity_s
        if steal_s is None:
            reasons["steal_share"] = counters["reasons"]["steal_s"]
        else:
            steal_share = steal_s / capacity_s
    return {
        "ranks": ranks,
        "window_s": counters["window_s"],
        "cores": counters["cores"],
        "launch_cpu_share": launch_share,
        "other_cpu_share": other_share,
        "steal_share": steal_share,
        "load_average": counters["load_average"],
        "frequency_mhz": counters["frequency_mhz"],
        "thermal_throttle_events": counters["thermal_throttle_events"],
        "quota_throttled_s": counters["quota_throttled_s"],
        "reasons": reasons,
    }


def _energy_per_sample(devices: Sequence[DeviceRecord], samples: int) -> float | None:
    energies = [device["energy_j"] for device in devices if device["energy_j"] is not None]
    return sum(energies) / samples if samples and len(energies) == len(devices) else None
