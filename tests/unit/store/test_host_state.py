"""Merging the host samples of ranks."""

from __future__ import annotations

import pytest

from benchbox.store.host_state import merge_host_state
from tests.support.example_run import CELL, rank_result
from tests.support.host_states import device, rank_host, with_host


def ranks(count=2):
    return [rank_result(CELL, rank) for rank in range(count)]


def test_the_time_of_all_ranks_of_a_host_is_not_that_of_other_processes():
    state = merge_host_state(with_host(ranks()))
    (host,) = state["hosts"]
    assert host["ranks"] == [0, 1]
    assert (host["launch_cpu_share"], host["other_cpu_share"]) == pytest.approx((0.8, 0.02))
    assert host["steal_share"] == 0
    assert host["reasons"] == {"thermal_throttle_events": "the kernel does not tell thermal_throttle_events"}
    assert (state["devices"], state["devices_reason"]) == (None, "the rank does not train on an NVIDIA device")


def test_ticks_that_sum_to_less_than_the_exact_time_of_the_ranks_are_no_negative_share():
    assert merge_host_state(with_host(ranks(), busy_s=7.9))["hosts"][0]["other_cpu_share"] == 0


def test_local_rank_0_begins_the_next_host():
    results = ranks(4)
    for number, result in enumerate(results):
        result["host"] = rank_host(number % 2, busy_s=8.2 if number < 2 else 9.8)
    hosts = merge_host_state(results)["hosts"]
    assert [host["ranks"] for host in hosts] == [[0, 1], [2, 3]]
    assert [host["other_cpu_share"] for host in hosts] == pytest.approx([0.02, 0.18])


@pytest.mark.parametrize(("count", "share"), [("busy_s", "other_cpu_share"), ("steal_s", "steal_share")])
def test_a_share_that_the_kernel_does_not_count_is_null_with_its_reason(count, share):
    (host,) = merge_host_state(with_host(ranks(), **{count: None}))["hosts"]
    assert host[share] is None
    assert host["reasons"][share] == f"the kernel does not tell {count}"


def test_shares_of_few_ticks_are_null_with_a_reason():
    (host,) = merge_host_state(with_host(ranks(), window_s=0.3))["hosts"]
    assert host["launch_cpu_share"] is host["other_cpu_share"] is host["steal_share"] is None
    assert host["reasons"]["other_cpu_share"] == "the kernel counts ticks, too coarse for 0.30 s of steps on 2 cores"


def test_a_result_without_a_host_sample_leaves_the_state_unknown():
    results = with_host(ranks())
    del results[1]["host"]
    unsampled = [{key: value for key, value in result.items() if key != "host"} for result in results]
    assert merge_host_state(results) is merge_host_state(unsampled) is merge_host_state([]) is None


def with_devices(**second_device):
    results = with_host(ranks())
    for number, values in enumerate(({}, second_device)):
        results[number]["host"] |= {"device": device(number, **values), "device_reason": None}
    return results


def test_energy_per_sample_is_that_of_all_devices_over_all_samples():
    state = merge_host_state(with_devices())
    assert [entry["rank"] for entry in state["devices"]] == [0, 1]
    assert state["devices_reason"] is None
    assert state["energy_j_per_sample"] == pytest.approx(6000 / (2 * CELL.batch * 4))


def test_energy_is_unknown_when_one_device_does_not_count_it():
    assert merge_host_state(with_devices(energy_j=None))["energy_j_per_sample"] is None
