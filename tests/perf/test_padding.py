"""Steps of pi05 small on the batch that a worker gets with full padding, and on that without, interleaved in one process."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from itertools import repeat
from statistics import median
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, copy_meta_policy, open_cell_data
from benchbox.spec.cell import Cell
from benchbox.theory.flops import total_cost, training_cost
from tests.support.datasets import write_unequal_robots
from tests.support.ratios import record_ratio

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.registry.contracts import Batch

pytestmark = [pytest.mark.perf, pytest.mark.usefixtures("one_thread")]

ROUNDS = 3
CELL = Cell(
    policy="pi05",
    size="small",
    backend="single",
    world_size=1,
    batch=2,
    cams=3,
    recipe="fp32",
)


def test_a_step_without_common_padding_takes_a_fraction_of_the_time_of_the_whole_batch(
    benchmark, capsys, tmp_path: Path
) -> None:
    """The robot has two of three cameras, and its task takes less than half of the prompt."""
    robots = write_unequal_robots(tmp_path)
    cell = replace(CELL, data=replace(robots, datasets=robots.datasets[1:]))
    policy = build_cell_policy(cell)
    spec, formula = policy.batch_spec(), copy_meta_policy(cell, policy)
    batches = []
    for padding in ("full", "longest"):
        with closing(open_cell_data(replace(cell, padding=padding), policy, 0)) as stream:
            batches.append(next(stream))
            statistics = stream.statistics
    whole, trimmed = batches
    assert torch.equal(whole["frame_index"], trimmed["frame_index"])
    assert whole["images"].shape[2] == spec.cameras > trimmed["images"].shape[2]
    session = build_session(cell, policy, statistics)

    def timed(batch: Batch) -> float:
        begin = time.perf_counter()
        session.step(repeat(batch))
        return time.perf_counter() - begin

    for batch in (whole, trimmed):
        timed(batch)
    ratios: list[float] = []
    benchmark.pedantic(lambda: ratios.append(timed(trimmed) / timed(whole)), rounds=ROUNDS)
    flops = [total_cost(training_cost(formula.work(batch))).model for batch in (trimmed, whole)]
    record_ratio(benchmark, "time_over_whole_batch", ratios, better="lower", goal=1.0)
    record_ratio(benchmark, "flops_over_whole_batch", flops[0] / flops[1], better="lower")
    with capsys.disabled():
        print(
            f"\npi05 small without common padding: {median(ratios):.2f} of the time of a step ({min(ratios):.2f} to "
            f"{max(ratios):.2f}), {flops[0] / flops[1]:.2f} of its FLOPs; {trimmed['images'].shape[2]} of {spec.cameras} "
            f"cameras, {trimmed['prompt_mask'].shape[1]} of {spec.prompt_tokens} prompt tokens"
        )
    assert median(ratios) < 1
