"""Rules on trainings whose gradients appear or change inside the optimizer's step."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from benchbox.audit.judge import judge
from tests.support.audited_trainings import STEPS, failing, loss_of, observe
from tests.support.observed_trainings import layers

if TYPE_CHECKING:
    from collections.abc import Callable


LIMIT = 0.01

pytestmark = pytest.mark.usefixtures("one_thread")


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: steps a base optimizer with the gradient at a perturbed weight."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=1e-3)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        moves = [0.05 * parameter.grad / (parameter.grad.norm() + 1e-12) for parameter in parameters]
        torch._foreach_add_(parameters, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(parameters, moves)
        self.base_optimizer.step()


# The step of AdamW without torch's hooks, which are there or not depending on whether anybody made an AdamW before.
_UNHOOKED_STEP = inspect.unwrap(torch.optim.AdamW.step)


class InlineSam(torch.optim.AdamW):
    """Evaluates its closure twice in one step, and updates by the second gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
            closure()
        _UNHOOKED_STEP(self)


class ClippingAdamW(torch.optim.AdamW):
    """Clips inside its own step, as several published optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        clip_in_hook(self)
        _UNHOOKED_STEP(self)


class ScalingAdamW(torch.optim.AdamW):
    """Writes into the gradients inside its own step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.01)
        _UNHOOKED_STEP(self)


class DerivedClippingAdamW(torch.optim.AdamW):
    """Clips inside its own step, and then runs the step of its base class, with its hooks."""

    def step(self, closure: Any = None) -> Any:
        clip_in_hook(self)
        return super().step(closure)


def clip_in_hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], LIMIT)


def step_with_closure(model: nn.Module, optimizer: torch.optim.Optimizer, *, clip: bool, by_keyword: bool) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        return loss

    if by_keyword:
        optimizer.step(closure=closure)
    else:
        optimizer.step(closure)


def with_closures(make: Callable[..., Any], dtype: torch.dtype = torch.float32, *, clip: bool = True, by_keyword: bool = True):
    """Return a training as Lightning's: forward, backward and clipping inside `step`, with a schedule."""

    def training() -> nn.Module:
        model = layers(dtype)
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for _ in range(STEPS + 1):
            step_with_closure(model, optimizer, clip=clip, by_keyword=by_keyword)
            schedule.step()
        return model

    return training


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_step_with_a_closure_is_observed_after_the_closure(by_keyword: bool) -> None:
    facts = observe(with_closures(adamw, by_keyword=by_keyword))
    judgement = judge([facts])
    assert [step.step for step in facts.steps] == list(range(1, STEPS + 1))
    assert [step.micro_batches for step in facts.steps if step.micro_batches is not None] == [1, 1, 1]
    first = facts.steps[0]
    assert (first.max_norm, first.stepped_norm) == (LIMIT, pytest.approx(LIMIT, rel=1e-3))
    assert all(tensor.numbers.update_dot == pytest.approx(tensor.numbers.update_squared, rel=1e-3) for tensor in facts.stepped)
    assert failing(judgement) == []
    assert {"BXP102", "BXP304", "BXP401", "BXP403"} <= {*judgement.clean}
    assert facts.products
    assert "autocast" not in facts.missing


def test_lost_updates_are_measured_in_steps_with_closures() -> None:
    def bfloat16_training() -> nn.Module:
        return with_closures(lambda parameters: torch.optim.AdamW(parameters, lr=1e-5), torch.bfloat16)()

    assert "BXP102" in failing(judge([observe(bfloat16_training)]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda parameters: torch.optim.LBFGS(parameters, lr=0.01, max_iter=3), "LBFGS calls its closure"),
        (lambda parameters: InlineSam(parameters, lr=1e-3), "InlineSam calls its closure 2 times in a step"),
    ],
    ids=["LBFGS", "SAM"],
)
def test_steps_that_call_their_closure_again_are_not_judged_on_their_gradients(make: Any, reason: str) -> None:
    judgement = judge([observe(with_closures(make, torch.bfloat16))])
    assert reason in judgement.not_judged["BXP102"]
    assert reason in judgement.not_judged["BXP304"]
    assert {"BXP401", "BXP403"}.isdisjoint(failing(judgement))


def test_an_optimizer_stepped_by_one_with_a_closure_is_observed_as_without() -> None:
    facts = observe(with_closures(Sam, clip=False))
    assert {tensor.optimizer for tensor in facts.stepped} == {"AdamW"}
    assert len(facts.steps) == STEPS
    assert all(tensor.numbers.update_dot == pytest.approx(tensor.numbers.update_squared, rel=1e-3) for tensor in facts.stepped)
    assert failing(judge([facts])) == []


def test_an_optimizer_that_steps_inside_the_closure_of_another_is_not_wrapped_by_it() -> None:
    def training() -> nn.Module:
        model = layers()
        outer = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
        inner = torch.optim.SGD(model[1].parameters(), lr=1e-3)

        def closure() -> torch.Tensor:
            model.zero_grad()
            loss = loss_of(model)
            loss.backward()
            inner.step()
            return loss

        for _ in range(STEPS + 1):
            outer.step(closure)
        return model

    facts = observe(training)
    assert {tensor.optimizer for tensor in facts.stepped} == {"AdamW", "SGD"}
    assert len(facts.steps) == STEPS


def without_closure(make: Callable[..., Any], *, hook: Any = None, clip: bool = False):
    def training() -> nn.Module:
        model = layers(torch.bfloat16)
        optimizer = make(model.parameters(), lr=1e-3)
        if hook is not None:
            optimizer.register_step_pre_hook(hook)
        for _ in range(STEPS + 1):
            optimizer.zero_grad()
            loss_of(model).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
        return model

    return training


@pytest.mark.parametrize(
    ("training", "name"),
    [
        (without_closure(ClippingAdamW), "ClippingAdamW"),
        (without_closure(torch.optim.AdamW, hook=clip_in_hook), "AdamW"),
        (without_closure(ScalingAdamW, clip=True), "ScalingAdamW"),
    ],
    ids=["clips in its step", "clips in a hook of its own", "scales gradients in its step"],
)
def test_steps_that_change_their_gradients_are_not_judged_on_them(training: Any, name: str) -> None:
    judgement = judge([observe(training)])
    reason = f"{name} changes gradients inside its step"
    assert (judgement.not_judged["BXP102"], judgement.not_judged["BXP304"]) == (reason, reason)


def test_a_step_that_clips_and_runs_the_step_of_its_base_class_is_observed_in_that() -> None:
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # from now on the step of this class runs hooks
    judgement = judge([observe(without_closure(DerivedClippingAdamW))])
    assert "BXP102" not in judgement.not_judged
    assert "BXP304" in judgement.clean


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_step_does_not_count_as_changing_its_gradients(fused: bool) -> None:
    judgement = judge([observe(without_closure(lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=fused), clip=True))])
    assert "BXP102" not in judgement.not_judged
    assert "BXP304" in judgement.clean


@pytest.mark.parametrize("hook", [None, clip_in_hook])
def test_nesterov_momentum_is_added_to_gradients_that_have_been_read(hook: Any) -> None:
    """The steps for several tensors use the gradients as memory for it. A hook that clips them comes before they are read."""

    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True, foreach=True)

    facts = observe(without_closure(make, hook=hook))
    changed = {step.changed_gradients for step in facts.steps}
    assert changed == ({None} if hook is None else {None, "SGD changes gradients inside its step"})
    assert all(bool(tensor.numbers.updates) == (hook is None) for tensor in facts.stepped)
