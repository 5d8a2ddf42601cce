"""Tests on trainings whose optimizer steps the wrong tensors, or masters that reach the model late or rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from benchbox.audit.judge import Judgement, judge
from benchbox.observer.observer import StepObserver

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 20
HALF = torch.bfloat16


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(dtype)


def backward(model: nn.Module, step: int) -> None:
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
    (model(batch) - 2 * batch).float().square().mean().backward()


class Masters:
    """AdamW on float32 copies of the parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.live = list(model.parameters())
        self.masters = [parameter.detach().float().requires_grad_() for parameter in self.live]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3)

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.live, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()

    @torch.no_grad()
    def copy(self) -> None:
        for master, parameter in zip(self.masters, self.live, strict=True):
            parameter.copy_(master)


def audited(training: Callable[[], object]) -> Judgement:
    with StepObserver(source="command", steps=STEPS) as observer:
        alive = training()
    facts = observer.facts()
    assert facts.problems == ()
    assert len(facts.steps) == STEPS
    del alive
    return judge([facts])


def finding(judgement: Judgement, code: str) -> tuple[str, list[str]] | None:
    return next(((f.severity, f.evidence["names"]) for f in judgement.findings if f.code == code), None)


NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def steps_an_earlier_model() -> object:
    """The model is built anew from its state after three steps, the optimizer is not."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS + 1):
        if step == 3:
            state = model.state_dict()
            model = network(seed=1)
            model.load_state_dict(state)
        model.zero_grad()
        backward(model, step)
        optimizer.step()
    return model, optimizer


def steps_a_copy() -> object:
    """The optimizer holds a copy of the model that looks like its masters, and never gets a gradient."""
    copy, model = network(), network()
    optimizer = torch.optim.AdamW(copy.parameters(), lr=1e-3)
    del copy
    for step in range(STEPS + 1):
        model.zero_grad()
        backward(model, step)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("training", [steps_an_earlier_model, steps_a_copy])
def test_weights_with_gradients_that_no_step_moves_are_an_error_whatever_the_wiring(training: Callable[[], object]) -> None:
    severity, names = finding(audited(training), "BXP404") or ("none", [])
    assert (severity, sorted(names)) == ("error", sorted(NAMES))


def test_weights_with_gradients_that_no_optimizer_knows_are_told_without_alarm() -> None:
    def training() -> object:
        model = nn.Sequential(network(), nn.Linear(16, 16))
        optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
        for step in range(STEPS + 1):
            model.zero_grad()
            backward(model, step)
            optimizer.step()
        return model

    assert finding(audited(training), "BXP404") == ("info", ["1.weight", "1.bias"])


@pytest.mark.parametrize("part", ["a frozen part", "a part without gradients"])
def test_weights_that_have_no_gradient_may_stay_as_they_are(part: str) -> None:
    def training() -> object:
        model, idle = network(), nn.Linear(4, 4)
        idle.requires_grad_(part == "a part without gradients")
        model.add_module("idle", idle)
        model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        return model

    assert finding(audited(training), "BXP404") is None


@pytest.mark.parametrize("late", [True, False])
def test_masters_that_reach_the_model_only_before_the_next_step_are_found(late: bool) -> None:
    def training() -> object:
        model = network(HALF)
        masters = Masters(model)
        for step in range(STEPS + 1):
            backward(model, step)
            if late:
                masters.copy()
            masters.step()
            if not late:
                masters.copy()
        return model

    judgement = audited(training)
    assert ((finding(judgement, "BXP104") or ("none",))[0], "BXP104" in judgement.clean) == (
        ("error", False) if late else ("none", True)
    )


@pytest.mark.parametrize("rederived", [True, False])
def test_a_resume_inside_the_process_that_derives_masters_again_is_found_and_a_right_one_is_not(rederived: bool) -> None:
    def training() -> object:
        model = network(HALF)
        masters = Masters(model)
        for step in range(STEPS + 1):
            if step == 5:
                state, kept = masters.optimizer.state_dict(), [master.detach().clone() for master in masters.masters]
                weights: dict[str, Tensor] = model.state_dict()
                model = network(HALF, seed=1)
                model.load_state_dict(weights)
                masters = Masters(model)
                masters.optimizer.load_state_dict(state)
                if not rederived:
                    for master, value in zip(masters.masters, kept, strict=True):
                        master.data.copy_(value)
            backward(model, step)
            masters.step()
            masters.copy()
        return model, masters

    codes = {f.code for f in audited(training).findings if f.severity == "error"}
    assert codes == ({"BXP501"} if rederived else set())


def test_masters_of_models_that_share_a_part_are_linked_in_its_place() -> None:
    """A list of parameters holds what is shared once."""

    def training() -> object:
        shared = network(HALF)
        models = nn.Sequential(shared, nn.Linear(16, 16, dtype=HALF)), nn.Sequential(shared, nn.Linear(16, 16, dtype=HALF))
        masters = Masters(nn.ModuleList(models))
        with torch.no_grad():
            shared[0].weight.zero_()  # weights loaded behind the masters' back
        for step in range(STEPS):
            for model in models:
                backward(model, step)
            masters.step()
            masters.copy()
        return models, masters

    assert finding(audited(training), "BXP504") == ("error", ["0.0.weight"])


@pytest.mark.parametrize("reaches", [True, False])
def test_a_group_that_is_added_after_its_schedule_is_scheduled_from_the_next_step_on(reaches: bool) -> None:
    def training() -> object:
        model = network()
        optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        for step in range(STEPS):
            backward(model, step)
            if step == 5:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 5e-4})
            optimizer.step()
            schedule.step()
            if not reaches:
                optimizer.param_groups[0]["lr"] = 1e-3
            optimizer.zero_grad()
        return model, optimizer, schedule

    assert ("BXP401" in {finding.code for finding in audited(training).findings}) != reaches


def test_a_warm_up_that_reaches_no_optimizer_is_found_though_both_end_at_the_same_rate() -> None:
    def training() -> object:
        model = network()
        optimizer, other = (torch.optim.AdamW(model.parameters(), lr=1e-3) for _ in range(2))
        schedule = torch.optim.lr_scheduler.LinearLR(other, 0.1, total_iters=5)
        for step in range(STEPS):
            backward(model, step)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return model, optimizer, schedule

    assert "BXP401" in {finding.code for finding in audited(training).findings}
