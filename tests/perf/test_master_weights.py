"""Cost of masters: clip, upcast, step and rounding, relative to torch's fused AdamW on float32 weights."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from benchbox.optim import MasterWeightOptimizer
from benchbox.optim.native import library
from tests.support.ratios import record_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.perf

ROUNDS = 25
# Compiled: 20 runs of 1.22 to 1.28 and one of 1.30 on two cores of an EPYC (Zen 1), where the step takes 1.08, the norm 0.10,
# and the Python around them 0.07. The traffic to memory is 1.07 times that of the reference: 30 bytes per parameter instead of
# 28. With three divisions of each element, as torch's kernel divides when there is a clip, the same machine took 1.42 to 1.47.
GOAL = 1.3
# Without a compiler: the cost of copies around a fused AdamW, tensor by tensor. Slower would be a mistake. torch's kernels take
# 1.58 here.
NAIVE = 2.65
# 50 M parameters in the shapes of transformer layers: four products and two norms each.
SHAPES = [(1024, 1024), (1024, 1024), (1024, 4096), (4096, 1024), (1024,), (1024,)] * 5


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def build_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.randn(shape).mul_(0.02).to(dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    return parameters


def test_masters_cost_less_than_copies_and_are_held_against_half_a_step_of_fused_adamw(benchmark, capsys, two_threads) -> None:
    """Interleaved in one process, 50 M parameters, 2 threads. Each round takes both, with the reference before and after, so
    that a drift cancels, and the median is that of the rounds' ratios. The test fails when the 96% interval of the median lies
    above the goal. The clip is active. Only an idle machine gives a valid result: beside other work the reference, whose
    threads wait for one another, slows down most and flatters the ratio.
    """
    arguments = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    reference = torch.optim.AdamW(build_parameters(torch.float32), **arguments)
    ours = MasterWeightOptimizer(build_parameters(torch.bfloat16), torch.optim.AdamW, **arguments)
    assert 50e6 < sum(master.numel() for master in ours.masters) < 55e6

    def with_masters() -> None:
        ours.clip_grad_norm_(1.0)
        ours.step()

    def seconds(work: Callable[[], object]) -> float:
        before = time.perf_counter()
        work()
        return time.perf_counter() - before

    ratios: list[float] = []

    def one_round() -> None:
        before_s, with_masters_s = seconds(reference.step), seconds(with_masters)
        ratios.append(with_masters_s / ((before_s + seconds(reference.step)) / 2))

    benchmark.pedantic(one_round, rounds=ROUNDS, warmup_rounds=2)
    del ratios[:2]  # the warm-up
    lower, upper = sorted(ratios)[7], sorted(ratios)[-8]  # of 25, the eighth from each end bound the median with 96%
    compiled = library() is not None
    name = "masters_over_fused_adamw" if compiled else "uncompiled_masters_over_fused_adamw"
    record_ratio(benchmark, name, ratios, better="lower", goal=GOAL if compiled else NAIVE)
    bound = f"goal {GOAL}" if compiled else f"nothing is compiled here: goal {GOAL} not tested, bound {NAIVE}"
    with capsys.disabled():
        print(f"\nclip + upcast + step + rounding over fused AdamW alone: {median(ratios):.2f} ", end="")
        print(f"[{lower:.2f}, {upper:.2f}] ({bound})")
    if compiled:
        assert lower <= GOAL
    else:
        assert sorted(ratios)[ROUNDS // 4] < NAIVE
