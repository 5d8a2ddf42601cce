"""Criteria of a busy host."""

from __future__ import annotations

import pytest

from benchbox.registry.host_load import BUSY_FORMULA, busy_reasons
from tests.support.example_run import example_record
from tests.support.host_states import device, quiet_state


def record(**values):
    return {**example_record(), "host": quiet_state(**values)}


@pytest.mark.parametrize(
    ("values", "reasons"),
    [
        ({"busy_s": 8.99}, ()),
        ({"busy_s": 9.0}, ("other processes used 10% of the CPU time",)),
        ({"steal_s": 0.49}, ()),
        ({"steal_s": 0.5}, ("the hypervisor took 5% of the CPU time",)),
        ({"busy_s": None, "steal_s": None}, ()),
        ({"busy_s": 9.9, "window_s": 0.3}, ()),
    ],
)
def test_a_host_is_busy_from_10_percent_of_other_processes_or_5_of_the_hypervisor(values, reasons):
    assert busy_reasons(record(**values)) == reasons


@pytest.mark.parametrize(
    ("throttled_s", "reasons"),
    [(None, ()), (0.39, ()), (0.41, ("the launch waited 0.41 s for a CPU quota, and used 8 s of CPU time",))],
)
def test_a_launch_that_its_cpu_quota_holds_back_is_on_a_busy_host(throttled_s, reasons):
    launch = record()
    launch["host"]["hosts"][0]["quota_throttled_s"] = throttled_s
    assert busy_reasons(launch) == reasons


@pytest.mark.parametrize(
    ("share", "reasons"), [(0.04, ()), (0.05, ("other processes used 5% of the GPU of rank 1",)), (None, ())]
)
def test_a_launch_that_shares_a_gpu_is_on_a_busy_host(share, reasons):
    launch = record()
    launch["host"]["devices"] = [device(0), device(1, other_utilisation=share)]
    assert busy_reasons(launch) == reasons


def test_a_record_of_before_the_host_was_recorded_is_not_called_busy():
    launch = record(busy_s=9.9)
    del launch["host"]
    assert busy_reasons(launch) == busy_reasons({**launch, "host": None}) == ()


def test_with_several_hosts_the_busy_one_is_named():
    launch = record()
    launch["host"]["hosts"] = [*launch["host"]["hosts"], *record(busy_s=10.0)["host"]["hosts"]]
    assert busy_reasons(launch) == ("host 1: other processes used 20% of the CPU time",)


def test_the_formula_names_every_threshold():
    assert all(text in BUSY_FORMULA for text in ("10%", "5%", "busy time - time of the ranks"))
