"""Counters of the host around the measured steps."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchbox.measure import control_groups, host
from benchbox.measure.host import HostReading, HostWindow, count, read_host, tree_cpu_s

CPU = torch.device("cpu")


def compute(seconds):
    deadline = time.process_time() + seconds
    while time.process_time() < deadline:
        pass


def test_a_window_counts_the_cpu_time_of_this_process_and_the_host_has_no_less(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    window = HostWindow(CPU)
    compute(0.5)
    sample = window.close(0)
    assert 0.48 <= sample["cpu_s"] < 5
    counters = sample["counters"]
    assert counters["window_s"] >= 0.5
    assert counters["busy_s"] >= 0.4  # sampled in ticks
    assert (sample["device"], sample["device_reason"]) == (None, "the rank does not train on an NVIDIA device")


def test_only_local_rank_0_reads_the_host(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    sample = HostWindow(CPU).close(1)
    assert (sample["local_rank"], sample["counters"]) == (1, None)
    assert sample["cpu_s"] >= 0


def test_everything_that_is_null_has_a_reason_and_nothing_else_has():
    for counters in (count(read_host(), read_host()), count(HostReading(0, *[None] * 6), HostReading(1, *[None] * 6))):
        assert set(counters["reasons"]) == {key for key, value in counters.items() if value is None}


def test_counters_are_differences_and_states_have_both_ends():
    start = HostReading(10.0, 100.0, 1.0, 2.0, 2100.0, 7, 0.5)
    end = replace(start, time_s=12.0, busy_s=103.5, steal_s=1.25, load_average=3.0, throttle_events=9, quota_throttled_s=0.75)
    counters = count(start, end)
    assert (counters["window_s"], counters["busy_s"], counters["steal_s"]) == (2.0, 3.5, 0.25)
    assert (counters["thermal_throttle_events"], counters["quota_throttled_s"]) == (2, 0.25)
    assert counters["load_average"] == {"start": 2.0, "end": 3.0}
    assert counters["reasons"] == {}


def test_a_system_without_these_counters_costs_no_launch(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("not on this system")

    for module, name in ((psutil, "cpu_times"), (psutil, "cpu_freq"), (host.os, "getloadavg")):
        monkeypatch.setattr(module, name, refuse)
    reading = read_host()
    assert reading.busy_s is reading.steal_s is reading.frequency_mhz is reading.load_average is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("usage_usec 5\nthrottled_usec 2500000\n", 2.5),
        ("nr_throttled 3\nthrottled_time 1500000000\n", 1.5),
        ("usage_usec 5\n", None),
    ],
)
def test_the_wait_for_a_cpu_quota_is_read_from_both_versions_of_control_groups(monkeypatch, tmp_path, text, seconds):
    (tmp_path / "cpu.stat").write_text(text)
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    assert read_host().quota_throttled_s == seconds


def test_thermal_throttle_events_are_summed_over_cores(monkeypatch, tmp_path):
    for core in range(2):
        folder = tmp_path / f"cpu{core}" / "thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(f"{core + 3}\n")
    monkeypatch.setattr(host, "_CPUS", tmp_path)
    assert read_host().throttle_events == 7


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_cpu_time_of_a_rank_is_also_that_of_its_children_while_they_live_and_when_they_have_ended(has_ended):
    code = "import sys, time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\nsys.stdin.read()"
    before = tree_cpu_s()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        spent = tree_cpu_s() - before
    if has_ended:
        spent = tree_cpu_s() - before
    assert spent >= 0.35


def test_the_time_of_niced_processes_and_of_interrupts_is_busy_and_that_of_waits_and_guests_is_not(monkeypatch):
    """A hypervisor counts guests among its own user time already."""
    times = {"user": 1, "nice": 2, "system": 4, "idle": 8, "iowait": 16, "irq": 32, "softirq": 64, "steal": 128, "guest": 256}
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(**times))
    reading = read_host()
    assert (reading.busy_s, reading.steal_s) == (1 + 2 + 4 + 32 + 64, 128)
