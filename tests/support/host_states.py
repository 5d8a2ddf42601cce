"""Host samples of ranks for tests of what is made of them. No number was measured."""

from __future__ import annotations

from typing import Any

from benchbox.store.host_state import merge_host_state
from tests.support.example_run import CELL, rank_result


def rank_host(
    local_rank: int = 0, *, cpu_s: float = 4.0, busy_s: float | None = 8.2, steal_s: float | None = 0.0, window_s: float = 5.0
) -> dict[str, Any]:
    """Return what a rank of two sampled on a host of 2 cores. By default the two used 8.0 of 8.2 busy seconds of 10."""
    unknown = {"busy_s": busy_s, "steal_s": steal_s, "thermal_throttle_events": None}
    counters = {
        "window_s": window_s,
        "cores": 2,
        "busy_s": busy_s,
        "steal_s": steal_s,
        "load_average": {"start": 2.0, "end": 2.5},
        "frequency_mhz": {"start": 2100.0, "end": 2100.0},
        "thermal_throttle_events": None,
        "quota_throttled_s": 0.0,
        "reasons": {key: f"the kernel does not tell {key}" for key, value in unknown.items() if value is None},
    }
    return {
        "local_rank": local_rank,
        "cpu_s": cpu_s,
        "counters": counters if local_rank == 0 else None,
        "device": None,
        "device_reason": "the rank does not train on an NVIDIA device",
    }


def device(rank: int, **values: Any) -> dict[str, Any]:
    """Return the state of a device that nobody else uses."""
    return {
        "rank": rank,
        "utilisation": 0.98,
        "other_processes": 0,
        "other_memory_bytes": 0,
        "other_utilisation": 0.0,
        "sm_clock_mhz": {"start": 1980.0, "end": 1980.0},
        "memory_clock_mhz": {"start": 3201.0, "end": 3201.0},
        "power_w": {"start": 600.0, "end": 650.0},
        "temperature_c": {"start": 50.0, "end": 60.0},
        "throttle_reasons": [],
        "energy_j": 3000.0,
        "reasons": {},
        **values,
    }


def with_host(ranks: list[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    """Return the results of the ranks of one host, with its samples."""
    return [{**result, "host": rank_host(number, **values)} for number, result in enumerate(ranks)]


def quiet_state(**values: Any) -> dict[str, Any]:
    """Return the host state of a launch of two ranks on one host; 2 % of its CPU time went to other processes."""
    state = merge_host_state(with_host([rank_result(CELL, rank) for rank in range(2)], **values))
    assert state is not None
    return state


def busy_state() -> dict[str, Any]:
    """Return the host state of a launch whose host spent 18 % of its CPU time on other processes."""
    return quiet_state(busy_s=9.8)
