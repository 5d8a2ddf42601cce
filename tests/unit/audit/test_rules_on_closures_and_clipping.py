"""Rules on trainings whose gradients appear or change inside the optimizer's step, and on clipping of several optimizers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from benchbox.audit.judge import judge
from benchbox.observer.observer import StepObserver
from tests.support.observed_trainings import layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.audit.judge import Judgement
    from benchbox.observer.facts import RankFacts

STEPS = 8
LIMIT = 0.01


pytestmark = pytest.mark.usefixtures("one_thread")


def observe(training: Callable[[], nn.Module]) -> RankFacts:
    """Return the facts of a training, after a check that its weights and random state are those of the unobserved one."""
    torch.manual_seed(0)
    unobserved, random_state = training(), torch.get_rng_state()
    torch.manual_seed(0)
    with StepObserver(source="command", steps=STEPS) as observer:
        observed = training()
    pairs = zip(unobserved.parameters(), observed.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "the observer changes the training"
    assert torch.equal(random_state, torch.get_rng_state())
    assert observer.facts().problems == ()
    return observer.facts()


def loss_of(model: nn.Module) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(torch.randn(4, 8, dtype=dtype)).float().square().mean()


def failing(judgement: Judgement) -> list[str]:
    return [finding.code for finding in judgement.findings if finding.severity in ("error", "warning")]


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


def adversaries(clipped_late: str | None = None):
    """Return a training of a generator and a critic, each clipped to a limit of its own right before its step."""

    def training() -> nn.Module:
        models = layers()
        generator, critic = models
        first = torch.optim.AdamW(generator.parameters(), lr=1e-3)
        second = torch.optim.SGD(critic.parameters(), lr=1e-3)
        for _ in range(STEPS + 1):
            models.zero_grad()
            loss_of(models).backward()
            for name, model, optimizer, limit in (("critic", critic, second, 1e-4), ("generator", generator, first, LIMIT)):
                if clipped_late == name:
                    optimizer.step()
                nn.utils.clip_grad_norm_(model.parameters(), limit)
                if clipped_late != name:
                    optimizer.step()
        return models

    return training


def test_each_of_two_optimizers_is_compared_with_its_own_clipping() -> None:
    judgement = judge([observe(adversaries())])
    assert failing(judgement) == []
    assert "BXP304" in judgement.clean


@pytest.mark.parametrize("early", [False, True])
def test_clipping_of_one_optimizer_is_not_compared_with_the_steps_of_another(early: bool) -> None:
    """A generator is clipped and stepped once for two steps of its critic, which is never clipped.

    Clipped early, it is so before the second of these steps.
    """

    def training() -> nn.Module:
        models = layers()
        generator, critic = models
        first = torch.optim.AdamW(generator.parameters(), lr=1e-3)
        second = torch.optim.SGD(critic.parameters(), lr=1e-3)
        for _ in range(STEPS):
            for turn in range(2):
                models.zero_grad()
                loss_of(models).backward()
                if early and turn == 1:
                    nn.utils.clip_grad_norm_(generator.parameters(), 1e-4)
                second.step()
            if not early:
                nn.utils.clip_grad_norm_(generator.parameters(), 1e-4)
            first.step()
        return models

    facts = observe(training)
    assert failing(judge([facts])) == []
    assert any(step.max_norm == 1e-4 and step.stepped_norm == pytest.approx(1e-4, rel=0.01) for step in facts.steps)


@pytest.mark.parametrize(("name", "limit"), [("critic", 1e-4), ("generator", LIMIT)])
def test_clipping_after_the_step_of_one_of_two_optimizers_is_found(name: str, limit: float) -> None:
    (finding,) = judge([observe(adversaries(name))]).findings
    assert (finding.code, finding.evidence["clipped to"]) == ("BXP304", limit)


def scaled(*, unscale: bool, fused: bool = False, limit: float = LIMIT):
    def training() -> nn.Module:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(STEPS + 1):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            scaler.step(optimizer)
            scaler.update()
        return model

    return training


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_before_the_gradients_are_unscaled_is_found(fused: bool) -> None:
    (finding,) = judge([observe(scaled(unscale=False, fused=fused))]).findings
    assert (finding.code, finding.severity, finding.evidence["loss scale"]) == ("BXP304", "error", 1024.0)
    assert "before they are unscaled" in finding.title
    assert "unscale_" in finding.repair


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_of_unscaled_gradients_is_clean(fused: bool) -> None:
    judgement = judge([observe(scaled(unscale=True, fused=fused))])
    assert judgement.findings == ()
    assert "BXP304" in judgement.clean


def test_a_limit_that_includes_the_loss_scale_is_clean() -> None:
    assert judge([observe(scaled(unscale=False, limit=LIMIT * 1024.0 * 200))]).findings == ()


def test_clipping_for_a_step_that_the_scaler_skips_is_not_compared_with_a_later_step() -> None:
    """The next step is not clipped, as in a training that clips only in its warm-up."""

    def training() -> nn.Module:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            scaler.scale(loss_of(model) * (float("inf") if step == 0 else 1.0)).backward()
            scaler.unscale_(optimizer)
            if step == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            scaler.step(optimizer)
            scaler.update()
        return model

    torch.manual_seed(0)
    with StepObserver(source="command", steps=STEPS) as observer:
        training()
    judgement = judge([observer.facts()])
    assert failing(judgement) == []
    assert judgement.not_judged["BXP304"] == "no clipping was seen"


@pytest.mark.parametrize(
    ("clipped", "codes"), [("copy", ["BXP304"]), ("frozen", []), ("model", []), ("both", []), ("inputs", [])]
)
def test_clipping_of_an_old_copy_of_the_weights_is_found(clipped: str, codes: list[str]) -> None:
    """Clipping of a frozen part of the model does nothing, and that of inputs, as for adversarial ones, is meant for them."""

    def training() -> nn.Module:
        model, copy = layers(), layers()
        frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW(model.parameters())
        lists = {"copy": [copy], "frozen": [frozen], "model": [model], "both": [copy, model], "inputs": []}[clipped]
        for _ in range(STEPS):
            batch = torch.randn(4, 8, requires_grad=True)
            (100 * model(frozen(batch)).square().mean()).backward()
            for module in lists:
                nn.utils.clip_grad_norm_(module.parameters(), LIMIT)
            if clipped == "inputs":
                nn.utils.clip_grad_norm_([batch], LIMIT)
            optimizer.step()
            optimizer.zero_grad()
        return model

    assert failing(judge([observe(training)])) == codes


@pytest.mark.parametrize("hook", [None, clip_in_hook])
def test_nesterov_momentum_is_added_to_gradients_that_have_been_read(hook: Any) -> None:
    """The steps for several tensors use the gradients as memory for it. A hook that clips them comes before they are read."""

    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True, foreach=True)

    facts = observe(without_closure(make, hook=hook))
    changed = {step.changed_gradients for step in facts.steps}
    assert changed == ({None} if hook is None else {None, "SGD changes gradients inside its step"})
    assert all(bool(tensor.numbers.updates) == (hook is None) for tensor in facts.stepped)
