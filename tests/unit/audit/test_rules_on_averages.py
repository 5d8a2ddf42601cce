"""Tests on trainings that keep an average of their weights."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from benchbox.audit.judge import Judgement, judge
from benchbox.observer.observer import StepObserver

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 20
HALF, FULL = torch.bfloat16, torch.float32


class AveragedList:
    """An EMA of plain tensors, as diffusers keeps one."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, rate: float) -> None:
        self.shadow = [parameter.detach().to(dtype, copy=True) for parameter in model.parameters()]
        self._rate = rate

    @torch.no_grad()
    def step(self, model: nn.Module) -> None:
        for average, parameter in zip(self.shadow, model.parameters(), strict=True):
            average.lerp_(parameter.to(average.dtype), self._rate)


def list_of_tensors(model: nn.Module, dtype: torch.dtype, rate: float) -> Callable[[], object]:
    average = AveragedList(model, dtype, rate)
    return lambda: average.step(model)


def averaged_model(model: nn.Module, dtype: torch.dtype, rate: float) -> Callable[[], object]:
    """Torch's own, the first update of which copies the weights."""

    def follow(average: Tensor, parameter: Tensor, _: Tensor) -> Tensor:
        return average + (rate * (parameter - average)).to(average.dtype)

    average = AveragedModel(model, avg_fn=follow).to(dtype)
    return lambda: average.update_parameters(model)


def frozen_copy(model: nn.Module, dtype: torch.dtype, rate: float) -> Callable[[], object]:
    """A reference that nothing is meant to update."""
    reference = copy.deepcopy(model).to(dtype)
    return lambda: (reference, rate)


def audited(
    average: Callable[[nn.Module, torch.dtype, float], Callable[[], object]],
    dtype: torch.dtype,
    rate: float,
    lr: float = 1e-2,
) -> Judgement:
    gc.collect()  # models of earlier tests would be taken for averages of this one
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    update = average(model, dtype, rate)
    with StepObserver(source="command", steps=STEPS) as observer:
        for _ in range(STEPS + 1):
            batch = torch.randn(8, 16)
            optimizer.zero_grad()
            (model(batch) - 2 * batch).square().mean().backward()
            optimizer.step()
            update()
    facts = observer.facts()
    assert facts.problems == ()
    return judge([type(facts).from_dict(facts.to_dict())])


@pytest.mark.parametrize("average", [list_of_tensors, averaged_model])
def test_an_average_in_16_bits_whose_updates_vanish_is_found(average) -> None:
    (finding,) = audited(average, HALF, 1e-3).findings
    assert (finding.code, finding.severity) == ("BXP107", "error")
    assert sorted(finding.evidence["names"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert finding.evidence["share that no step changed, of elements that lag"] > 0.8


@pytest.mark.parametrize(
    ("average", "rate"),
    [(list_of_tensors, 0.2), (frozen_copy, 1e-3)],
    ids=["a rate that 16 bits take", "a frozen reference"],
)
def test_averages_that_follow_and_references_that_need_not_are_clean(average, rate: float) -> None:
    judgement = audited(average, HALF, rate)
    assert judgement.findings == ()
    assert "BXP107" in judgement.clean


@pytest.mark.parametrize("lr", [1e-2, 1e-7], ids=["trained", "in a warm-up"])
@pytest.mark.parametrize("average", [list_of_tensors, averaged_model])
def test_averages_in_float32_are_clean(average, lr: float) -> None:
    """At the small rates of a warm-up their updates are less than their own precision too, and no fault."""
    judgement = audited(average, FULL, 1e-4, lr)
    assert judgement.findings == ()
    assert "BXP107" in judgement.clean


def test_an_average_in_float32_that_is_rounded_to_16_bits_is_found() -> None:
    def rounded(model: nn.Module, dtype: torch.dtype, rate: float) -> Callable[[], object]:
        average = AveragedList(model, dtype, rate)

        @torch.no_grad()
        def step() -> None:
            for averaged, parameter in zip(average.shadow, model.parameters(), strict=True):
                averaged.copy_(averaged.to(HALF).lerp_(parameter.to(HALF), rate))

        return step

    (finding,) = audited(rounded, FULL, 1e-3).findings
    assert (finding.code, finding.evidence["dtypes"]) == ("BXP107", ["float32"])


def test_without_an_average_there_is_none_to_judge() -> None:
    judgement = audited(lambda *_: lambda: None, FULL, 1e-3)
    assert judgement.not_judged["BXP107"] == "no average of the weights was found"


def test_where_the_model_is_passed_no_average_is_searched_for() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StepObserver(source="session", steps=3, model=model, optimizer=optimizer) as observer:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert judge([observer.facts()]).not_judged["BXP107"] == "no average of the weights was searched for"
