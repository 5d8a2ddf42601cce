"""Cost of observing a training, against its numbers of parameters, of optimizers and of observed steps."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from benchbox.observer.observer import StepObserver
from tests.support.ratios import record_ratio

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.perf

ROUNDS = 3
STEPS = 24  # of which the observer watches the first 20, as `audit-precision -- CMD` does
WATCHED = 20
FEW, MANY = 40, 300  # parameters
WIDTH = 64


@pytest.fixture(autouse=True, scope="module")
def _on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train_s(parameters: int, *, watched: int, in_backward: bool, steps: int = STEPS) -> float:
    """Return the CPU seconds of a training that steps one optimizer, or one for each parameter inside the backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2)))
    if in_backward:
        optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}

        def step(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    observer = StepObserver(source="command", steps=watched)
    before = time.process_time()
    if watched:
        observer.install()
    for _ in range(steps):
        model(torch.randn(8, WIDTH)).square().mean().backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    seconds = time.process_time() - before
    assert observer.steps_observed == watched
    assert observer.facts().problems == ()
    return seconds


def costs_s(parameters: int, *, in_backward: bool) -> tuple[float, float]:
    """Return (bare, additional) CPU seconds: medians of interleaved trainings."""
    pairs = []
    for _ in range(ROUNDS):
        bare = train_s(parameters, watched=0, in_backward=in_backward)
        pairs.append((bare, train_s(parameters, watched=WATCHED, in_backward=in_backward) - bare))
    return median(bare for bare, _ in pairs), median(additional for _, additional in pairs)


@pytest.fixture(scope="module")
def many_optimizers_s() -> tuple[float, float]:
    """CPU seconds, bare and additional, with one optimizer for each of many parameters."""
    return costs_s(MANY, in_backward=True)


def test_the_cost_grows_no_faster_than_the_number_of_parameters_each_with_its_own_optimizer(
    benchmark, capsys, many_optimizers_s
) -> None:
    """A search of the process for each optimizer would cost 300 / 40 squared, and hundreds of times the training."""
    few_s, few_additional_s = benchmark.pedantic(lambda: costs_s(FEW, in_backward=True), rounds=1)
    many_s, many_additional_s = many_optimizers_s
    growth = many_additional_s / few_additional_s
    record_ratio(benchmark, "many_over_few_optimizers", growth, better="lower", goal=MANY / FEW)
    record_ratio(benchmark, "observed_over_bare", 1 + many_additional_s / many_s, better="lower", goal=2.0)
    with capsys.disabled():
        print(f"\none optimizer for each parameter, {WATCHED} of {STEPS} steps watched, over the bare training: ", end="")
        print(f"{FEW} parameters x {1 + few_additional_s / few_s:.2f}, ", end="")
        print(f"{MANY} parameters x {1 + many_additional_s / many_s:.2f}; growth x {growth:.2f} of x {MANY / FEW:.2f}", end="")
    assert growth <= MANY / FEW
    assert many_additional_s <= many_s


def test_many_optimizers_cost_little_more_than_one_for_the_same_parameters(benchmark, capsys, many_optimizers_s) -> None:
    one_s, one_additional_s = benchmark.pedantic(lambda: costs_s(MANY, in_backward=False), rounds=1)
    _, many_additional_s = many_optimizers_s
    growth = many_additional_s / one_additional_s
    record_ratio(benchmark, "many_over_one_optimizer", growth, better="lower", goal=4.0)
    with capsys.disabled():
        print(f"\n{MANY} parameters: one optimizer x {1 + one_additional_s / one_s:.2f} of the bare training; ", end="")
        print(f"{MANY} optimizers cost x {growth:.2f} of what one costs", end="")
    assert growth <= 4


def test_the_cost_does_not_grow_with_the_number_of_watched_steps(benchmark, capsys) -> None:
    """Three steps are probed and one is recorded by operation, however many are watched."""
    bare, short, long = 0, 10, 40
    rounds: list[dict[int, float]] = []

    def one_round() -> None:
        rounds.append({steps: train_s(FEW, watched=steps, in_backward=False, steps=long) for steps in (bare, short, long)})

    benchmark.pedantic(one_round, rounds=3 * ROUNDS)
    # Within rounds: a shared processor is twice as slow for seconds, longer than the three trainings of a round take.
    difference = median((seconds[long] - seconds[short]) / seconds[bare] for seconds in rounds)
    ratios = [seconds[long] / seconds[short] for seconds in rounds]
    record_ratio(benchmark, "many_over_few_watched_steps", ratios, better="lower")
    with capsys.disabled():
        print(f"\n{long} instead of {short} watched steps cost {difference:+.3f} of a bare training of {long} steps", end="")
    assert difference <= 0.25
