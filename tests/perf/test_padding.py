"""Steps of pi05 small on a batch with common padding, and on the same batch without it, interleaved in one process."""

from __future__ import annotations

import time
from itertools import repeat
from statistics import median
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.data.loading.trimming import trim
from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, copy_meta_policy
from benchbox.spec.cell import Cell, DataSpec
from benchbox.theory.flops import total_cost, training_cost
from tests.support.policy_batches import make_batch
from tests.support.ratios import record_ratio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.registry.contracts import Batch

pytestmark = pytest.mark.perf

ROUNDS = 5
CELL = Cell(
    policy="pi05",
    size="small",
    backend="single",
    world_size=1,
    batch=4,
    cams=3,
    recipe="fp32",
    data=DataSpec(kind="synthetic", workers=0),
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_step_without_common_padding_takes_a_fraction_of_the_time_of_the_whole_batch(benchmark, capsys) -> None:
    """The last camera of three is missing in every sample, and prompts have random lengths."""
    policy = build_cell_policy(CELL)
    spec, formula = policy.batch_spec(), copy_meta_policy(CELL, policy)
    whole = make_batch(spec, CELL.batch)
    whole["image_mask"][..., -1] = False
    (trimmed,) = trim([whole], spec.trimmable)
    session = build_session(CELL, policy, SyntheticSamples(spec, CELL.seed).statistics)

    def timed(batch: Batch) -> float:
        begin = time.perf_counter()
        session.step(repeat(batch))
        return time.perf_counter() - begin

    for batch in (whole, trimmed):
        timed(batch)
    ratios = [timed(trimmed) / timed(whole) for _ in range(ROUNDS)]
    benchmark.pedantic(timed, args=(trimmed,), rounds=1)
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
