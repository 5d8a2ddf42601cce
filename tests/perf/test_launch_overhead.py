"""New interpreters against processes forked from a server, interleaved: the time of a launch beyond its steps, and the steps.

A launch of each is enough for the former: new interpreters take many times as long. `BENCHBOX_PERF_LAUNCHES=20` takes that many
of each, for an interval of the ratio of step times.
"""

from __future__ import annotations

import json
import os
import random
import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import pytest

from benchbox.launch.launch import launch_cell
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import MeasureSpec
from tests.support.ranks import tiny_cell
from tests.support.ratios import record_ratio

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.perf, pytest.mark.ranks]

ROUNDS = int(os.environ.get("BENCHBOX_PERF_LAUNCHES", "1"))
MEASURE = MeasureSpec(warmup_steps=3, steps=8, launches=1)
STEPS = ("warmup", "measure")


def stage_durations(folder: Path, started: float, ended: float) -> dict[str, float]:
    """Return seconds by stage of rank 0, from the start of the launch to its end."""
    events = [json.loads(line) for line in (folder / "events-rank0.jsonl").read_text().splitlines()]
    marks = [("start", started)]
    for event in events:
        stage = event.get("stage") if event["event"] == "progress" else {"start": "import", "done": "exit"}.get(event["event"])
        if stage is not None and stage != marks[-1][0]:
            marks.append((stage, event["t"]))
    durations: dict[str, float] = {}
    for (stage, begin), (_, end) in pairwise([*marks, ("", ended)]):
        durations[stage] = durations.get(stage, 0.0) + end - begin
    return durations


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return the 95% interval of the median by a percentile bootstrap."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(4000))
    return medians[100], medians[-101]


@pytest.mark.parametrize("backend", ["ddp", "zero2"])
def test_a_forked_launch_costs_less_beyond_its_steps_than_new_interpreters(benchmark, capsys, tmp_path, backend) -> None:
    """pi05 tiny on two ranks, with the same losses bit for bit. The server starts before, in a launch that is not counted."""
    launchers = {"torchrun": TorchrunLauncher(), "fork_server": ForkServerLauncher()}
    stages: dict[str, list[dict[str, float]]] = {name: [] for name in launchers}
    step_s: dict[str, list[float]] = {name: [] for name in launchers}
    losses: list[list[float]] = []

    def launch(name: str) -> None:
        folder = tmp_path / f"{name}-{len(stages[name])}"
        started = time.time()
        record = launch_cell(tiny_cell(backend=backend), MEASURE, launch=1, folder=folder, launcher=launchers[name])
        assert record["status"] == "ok", record["error"]
        stages[name].append(stage_durations(folder, started, time.time()))
        step_s[name].append(median(record["step_time_s"]["slowest"]))
        losses.append(record["loss"])

    launch("fork_server")
    stages["fork_server"].clear()
    step_s["fork_server"].clear()
    benchmark.pedantic(lambda: [launch(name) for name in launchers], rounds=ROUNDS)
    launchers["fork_server"].close()

    beyond = {
        name: [sum(seconds for stage, seconds in launch.items() if stage not in STEPS) for launch in launches]
        for name, launches in stages.items()
    }
    ratio = median(beyond["fork_server"]) / median(beyond["torchrun"])
    record_ratio(benchmark, "forked_over_new", ratio, better="lower", goal=1.0)
    benchmark.extra_info |= {f"{name}_s": median(seconds) for name, seconds in beyond.items()}
    ratios = [forked / new for forked, new in zip(step_s["fork_server"], step_s["torchrun"], strict=True)]
    low, high = median_interval(ratios)
    benchmark.extra_info |= {"step_ratio": median(ratios), "step_ratio_95": [low, high] if ROUNDS > 1 else None}
    with capsys.disabled():
        print(f"\n{backend}: forked / new interpreters, beyond warm-up and measured steps: {ratio:.2f}")
        for name, launches in stages.items():
            table = ", ".join(f"{stage} {median(launch.get(stage, 0.0) for launch in launches):.2f}" for stage in launches[0])
            print(f"  {name}: {median(beyond[name]):.2f} s beyond its steps ({table})")
        if ROUNDS > 1:
            print(f"  step time forked / new, {ROUNDS} pairs: {median(ratios):.3f}, 95% interval [{low:.3f}, {high:.3f}]")
    assert max(beyond["fork_server"]) < min(beyond["torchrun"])
    assert all(loss == losses[0] for loss in losses)
