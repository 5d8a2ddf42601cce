"""Cost of recording when ranks arrive at collectives, relative to the step that has most of them."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median
from typing import TYPE_CHECKING

import pytest

from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import MeasureSpec
from tests.support.ranks import tiny_cell
from tests.support.ratios import record_ratio

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.perf, pytest.mark.ranks]

ALLOWED = 0.01
SCRIPT = """
import sys, time, torch, torch.distributed as dist
from benchbox.measure.collective_times import CollectiveClock
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
clock = CollectiveClock(torch.device("cpu"))
if sys.argv[1] == "recorded":
    clock.reason = None
value = torch.zeros(1)
costs = []
with clock:
    for _ in range(20):
        before = time.thread_time()
        for _ in range(500):
            dist.all_reduce(value)
        costs.append((time.thread_time() - before) / 500)
dist.destroy_process_group()  # gloo's threads would end the process with an error now and then
print(min(costs))
"""


PAIRS = 2  # of processes: a virtual core may be slower for as long as one of them runs


def added_cost_s() -> float:
    """Return the processor time that recording adds to one collective, by processes with and without it in turn."""
    costs = [(cost_s("recorded", 20_000), cost_s("bare", 0)) for _ in range(PAIRS)]
    recorded, bare = zip(*costs, strict=True)
    return min(recorded) - min(bare)


def cost_s(mode: str, buffer: int) -> float:
    """Return the processor time of one collective without peers; the least of many, which noise only adds to."""
    variables = {**os.environ, "TORCH_FR_BUFFER_SIZE": str(buffer), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_recording_costs_at_most_one_percent_of_a_step_of_pi05_small_under_fsdp2(benchmark, capsys, tmp_path: Path) -> None:
    launcher = ForkServerLauncher()
    cell = tiny_cell(size="small", backend="fsdp2", recipe="fp32", batch=1)
    measure = MeasureSpec(warmup_steps=1, steps=3, launches=1)
    record = launch_cell(cell, measure, launch=1, folder=tmp_path, launcher=launcher)
    launcher.close()
    assert record["status"] == "ok", record["error"]
    collectives = sum(calls["count"] for calls in record["collectives"].values())
    added_s = benchmark.pedantic(added_cost_s, rounds=1)
    share = collectives * added_s / median(record["step_time_s"]["slowest"])
    with capsys.disabled():
        print(f"\n{collectives} collectives a step, {added_s * 1e6:.1f} us each to record: {share:.4%} of the step")
    assert added_s > 0
    record_ratio(benchmark, "recording_share_of_step", share, better="lower", goal=ALLOWED)
    assert share <= ALLOWED
