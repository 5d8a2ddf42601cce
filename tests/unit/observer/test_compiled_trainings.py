"""Trainings that torch.compile compiles: the observer changes neither their results nor what is compiled."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from benchbox.audit.judge import judge
from benchbox.audit.subjects.command.process_reports import Training, explain_unseen_steps
from benchbox.observer.hooks import tracing
from benchbox.observer.observer import StepObserver
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchbox.observer.facts import RankFacts

STEPS = 4
COMPILED = "the step is compiled: not observed"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Forget compiled code, and the idle hooks that observers of compiled trainings leave behind."""
    registries = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks, _global_forward_pre_hooks]
    before = [dict(registry) for registry in registries]
    clip = nn.utils.clip_grad_norm_
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # an observer asks whether the process has compiled anything
    nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = clip
    for registry, hooks in zip(registries, before, strict=True):
        registry.clear()
        registry.update(hooks)


def train(kind: str, backend: str) -> nn.Module:
    """Train a small model of which the model, the step, both, the backward pass or everything is compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    net, step = model, optimizer.step
    backward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if kind in ("model", "model and step"):
        net = torch.compile(model, backend=backend)
    if kind in ("step", "model and step"):
        step = torch.compile(optimizer.step, backend=backend)
    if kind == "backward":
        from torch._dynamo import compiled_autograd

        compiler = torch.compile(backend=backend)
        backward = lambda: compiled_autograd._enable(compiler)  # noqa: E731 (one function for each case)

    def take(batch: torch.Tensor) -> None:
        with backward():
            net(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        step()
        optimizer.zero_grad()

    def take_all(batch: torch.Tensor) -> None:
        net(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        step()
        optimizer.zero_grad()

    def function_that_steps() -> None:
        optimizer.step()

    if kind == "function that steps":
        step = torch.compile(function_that_steps, backend=backend)
    if kind == "everything":
        take = torch.compile(take_all, backend=backend)
    for _ in range(STEPS + 4):
        take(torch.randn(8, 16))
    return model


def run(training: Callable[[], nn.Module], observer: StepObserver | None = None) -> tuple[nn.Module, dict[str, int]]:
    """Return the trained model, and what torch compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with observer or contextlib.nullcontext():
        model = training()
    return model, {"graphs": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)}


def compare(training: Callable[[], nn.Module]) -> RankFacts:
    """Return the facts of a training, after a check that its weights and its graphs are those without the observer."""
    unobserved, graphs = run(training)
    observer = StepObserver(source="command", steps=STEPS)
    observed, observed_graphs = run(training, observer)
    pairs = zip(unobserved.parameters(), observed.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "the observer changes the training"
    assert observed_graphs == graphs, "the observer makes torch compile something else"
    assert observer.facts().problems == ()
    return observer.facts()


@pytest.mark.parametrize(
    "kind", in_tiers(["step", "function that steps", "model and step", "everything"], lambda kind: kind != "model and step")
)
def test_a_compiled_step_is_not_observed_and_not_judged(kind: str) -> None:
    facts = compare(lambda: train(kind, "eager"))
    assert facts.steps == ()
    judgement = judge([facts])
    assert judgement.findings == ()
    for code in ("BXP101", "BXP102", "BXP201", "BXP304", "BXP404", "BXP604"):
        assert judgement.not_judged[code] == COMPILED if code != "BXP304" else code in judgement.not_judged


def test_a_compiled_step_under_a_loss_scaler_is_not_taken_for_one_that_was_skipped() -> None:
    def train_scaled() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(STEPS):
            scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model

    facts = compare(train_scaled)
    assert facts.scaler is not None
    assert explain_unseen_steps(Training((facts,))) == f"no optimizer step was seen: {COMPILED}"
    assert judge([facts]).findings == ()


@pytest.mark.parametrize("kind", ["model", "backward"])
def test_a_compiled_model_and_a_compiled_backward_pass_are_observed_in_eager_steps(kind: str) -> None:
    facts = compare(lambda: train(kind, "eager"))
    assert [step.step for step in facts.steps] == list(range(1, STEPS + 1))
    assert [step.micro_batches for step in facts.steps if step.micro_batches is not None] == [1, 1, 1]
    judgement = judge([facts])
    assert judgement.findings == ()
    assert {"BXP101", "BXP102", "BXP304", "BXP403", "BXP404"} <= {*judgement.clean}


@pytest.mark.exhaustive
def test_the_default_compiler_gives_the_same_bits() -> None:
    """Inductor fuses what it gets: an operation more in a graph would round differently."""
    compare(lambda: train("step", "inductor"))


def test_an_optimizer_that_is_compiled_beside_an_observed_one_is_unknown() -> None:
    def training() -> nn.Module:
        torch.manual_seed(0)
        models = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        first = torch.optim.AdamW(models[0].parameters(), lr=1e-3)
        second = torch.optim.AdamW(models[1].parameters(), lr=1e-3)
        compiled = torch.compile(second.step, backend="eager")
        for _ in range(STEPS + 1):
            models(torch.randn(4, 8)).square().mean().backward()
            first.step()
            compiled()
            models.zero_grad()
        return models

    facts = compare(training)
    assert {tensor.name for tensor in facts.stepped} == {"0.weight", "0.bias"}
    (finding,) = judge([facts]).findings
    assert (finding.code, finding.severity, finding.evidence["reason"]) == ("BXP604", "unknown", COMPILED)


def test_hooks_that_were_compiled_do_nothing_after_the_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = StepObserver(source="command", steps=STEPS)
    run(lambda: train("step", "eager"), observer)
    monkeypatch.setattr(StepObserver, "begin_step", lambda *_: pytest.fail("a removed observer was called"))
    facts = observer.facts()
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    assert observer.facts() == facts


def test_a_hook_that_no_compiler_traced_is_not_noted() -> None:
    watch = tracing.TraceWatch("step")
    run(lambda: train("model", "eager"), StepObserver(source="command", steps=STEPS))
    assert not watch
    run(lambda: train("step", "eager"), StepObserver(source="command", steps=STEPS))
    assert watch
