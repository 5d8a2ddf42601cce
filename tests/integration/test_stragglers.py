"""Real ranks, one of which is slower than the other: the report names it for the right reason, and names none without one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from benchbox.analysis.stragglers import find_straggler
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.registry.phases import STEP_PARTS
from benchbox.spec.cell import MeasureSpec
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POLICIES = Path(__file__).parent / "policies"
MEASURE = MeasureSpec(warmup_steps=2, steps=14, launches=1)

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def launcher() -> Iterator[ForkServerLauncher]:
    launcher = ForkServerLauncher(worker_module="tests.integration.slow_data_worker")
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def sleeps(launcher: ForkServerLauncher, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return the record of a backend under which rank 1 sleeps in its forward pass; each is launched once."""
    return cache(lambda backend: launch(launcher, tmp_path_factory.mktemp(backend), "sleeps", backend))


def launch(launcher: ForkServerLauncher, folder: Path, size: str, backend: str = "ddp") -> dict[str, Any]:
    cell = tiny_cell(policy="straggling", size=size, recipe="fp32", backend=backend)
    record = launch_cell(cell, MEASURE, launch=1, folder=folder, launcher=launcher, policy_dirs=[POLICIES])
    assert record["status"] == "ok", record["error"]
    return record


@contextmanager
def busy_core(core: int, events: Path) -> Iterator[None]:
    """Keep a core busy with several processes, so that it shows on a machine that is busy as well, until the steps have ended.

    Linux may divide a core among sessions before processes (`sched_autogroup`): with one session for all, they would get no
    more than the rank.
    """
    spin = (
        f"import os, pathlib; os.sched_setaffinity(0, [{core}]); print('spinning', flush=True)\n"
        f"events = pathlib.Path({str(events)!r})\n"
        """while not (events.exists() and '"probe"' in events.read_text()): pass"""
    )
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", spin], stdout=subprocess.PIPE, start_new_session=True) for _ in range(6)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == b"spinning\n"
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero2"])
def test_a_rank_that_sleeps_in_its_forward_computes_longer_and_the_other_waits_for_it(sleeps, backend) -> None:
    record = sleeps(backend)
    straggler = find_straggler(record["step_split_s"])
    assert (straggler.rank, straggler.part) == (1, "compute")
    assert straggler.lag_s == pytest.approx(0.1, rel=0.3)
    waits = record["step_split_s"]["rank_wait"]["per_rank"]
    assert median(waits[0]) > 0.06
    assert median(waits[1]) < 0.04


def test_a_rank_whose_samples_are_slow_waits_for_data(launcher, tmp_path) -> None:
    straggler = find_straggler(launch(launcher, tmp_path, "slow_data")["step_split_s"])
    assert (straggler.rank, straggler.part) == (0, "data_wait")


@pytest.mark.skipif(psutil.cpu_count() < 2, reason="two ranks need a core each")
def test_a_rank_whose_core_is_busy_waits_for_it(launcher, tmp_path) -> None:
    with busy_core(1, tmp_path / "events-rank1.jsonl"):
        straggler = find_straggler(launch(launcher, tmp_path, "busy_core")["step_split_s"])
    assert straggler is not None
    assert (straggler.rank, straggler.part) == (1, "core_wait")


def test_no_rank_is_named_among_equal_ones(launcher, tmp_path) -> None:
    """A virtual core may be slower than the other for a launch or two, and the rank on it is rightly named: 10 of 50 launches
    on an idle virtual machine. Not in five launches that follow one another.
    """
    stragglers = (find_straggler(launch(launcher, tmp_path / str(number), "balanced")["step_split_s"]) for number in range(5))
    named = list(takewhile(lambda straggler: straggler is not None, stragglers))
    assert len(named) < 5, named


def test_the_parts_of_a_step_add_up_to_it(sleeps) -> None:
    record = sleeps("ddp")
    split, times = record["step_split_s"], record["step_time_s"]["per_rank"]
    assert tuple(split) == STEP_PARTS
    for rank, steps in enumerate(times):
        sums = [sum(split[part]["per_rank"][rank][step] for part in STEP_PARTS) for step in range(len(steps))]
        assert sums == pytest.approx(steps, rel=0.02)


def test_one_rank_has_no_split(launcher, tmp_path) -> None:
    cell = tiny_cell(policy="straggling", size="balanced", recipe="fp32", backend="single", world_size=1)
    record = launch_cell(cell, MEASURE, launch=1, folder=tmp_path, launcher=launcher, policy_dirs=[POLICIES])
    assert (record["step_split_s"], record["step_split_reason"]) == (None, "there is one rank")
