"""Cores that a process may use, by its affinity and by the quotas of its control groups."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest

from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.measure import control_groups
from benchbox.measure.control_groups import quota_throttled_s, usable_cores, usable_memory_bytes
from benchbox.measure.environment import environment

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of control groups of a machine with 64 cores, without quotas."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "cgroup"


def write(groups: Path, files: dict[str, str], membership: str = "") -> None:
    for name, text in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (groups.parent / "membership").write_text(membership)


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", 64), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("9000000 100000", 64)],
)
def test_a_quota_of_a_container_is_so_many_whole_cores_and_one_at_least(groups: Path, limit: str, cores: int) -> None:
    write(groups, {"cpu.max": limit}, "0::/\n")
    assert usable_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 64), ("400000", 4)])
def test_a_quota_of_version_1_is_found_where_the_path_of_the_group_is_that_of_the_host(
    groups: Path, quota: str, cores: int
) -> None:
    write(
        groups, {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/docker/5c3b\n3:cpuset:/\n"
    )
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("files", "membership", "usable"),
    [
        ({}, "0::/job/step", 2**34),
        ({"memory.max": "max", "job/memory.max": f"{2**33}", "job/step/memory.max": "max"}, "0::/job/step", 2**33),
        ({"memory.max": f"{2**40}"}, "0::/job/step", 2**34),
        ({"memory/memory.limit_in_bytes": f"{2**32}"}, "5:memory:/docker/5c3b", 2**32),
        ({"memory/job/memory.limit_in_bytes": f"{2**31}", "cpu/job/memory.limit_in_bytes": "1"}, "5:memory:/job/step", 2**31),
    ],
)
def test_the_smallest_limit_of_memory_holds(
    groups: Path, files: dict[str, str], membership: str, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**34))
    write(groups, files, f"{membership}\n")
    assert usable_memory_bytes() == usable


def test_the_smallest_quota_of_the_groups_around_a_process_holds(groups: Path) -> None:
    """Systemd and Slurm limit a group above that of the process."""
    files = {"cpu.max": "max 100000", "job.slice/cpu.max": "800000 100000", "job.slice/step/cpu.max": "max 100000"}
    write(groups, files, "0::/job.slice/step\n")
    assert usable_cores() == 8


def test_threads_of_ranks_and_the_record_keep_to_the_quota(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of 32 threads each would wait for a quota of four cores most of the time."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write(groups, {"cpu.max": "400000 100000"}, "0::/\n")
    assert TorchrunLauncher().variables(2)["OMP_NUM_THREADS"] == "2"
    assert environment()["usable_cores"] == 4


def test_a_group_outside_the_container_and_a_system_without_groups_limit_nothing(groups: Path) -> None:
    assert (usable_cores(), quota_throttled_s()) == (64, None)
    write(groups, {}, "0::/../../other\n")
    assert usable_cores() == 64


def test_waits_for_the_quotas_of_all_groups_around_a_process_count(groups: Path) -> None:
    write(groups, {"cpu.stat": "throttled_usec 0", "job/cpu.stat": "nr_periods 5\nthrottled_usec 1500000"}, "0::/job\n")
    assert quota_throttled_s() == 1.5


def test_waits_for_the_quotas_of_a_group_and_of_those_around_it_add_up(groups: Path) -> None:
    """Each group counts the waits for its own quota."""
    stat = "nr_periods 9\nthrottled_usec {}"
    write(groups, {"job/cpu.stat": stat.format(2_000_000), "job/step/cpu.stat": stat.format(500_000)}, "0::/job/step\n")
    assert quota_throttled_s() == pytest.approx(2.5)
