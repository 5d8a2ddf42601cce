"""Trainings with one optimizer for each parameter, stepped as soon as its gradient is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from benchbox.observer import recording
from benchbox.observer.observer import StepObserver

if TYPE_CHECKING:
    import pytest

STEPS = 5


def train() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS + 2):
        model(torch.randn(4, 8)).square().mean().backward()
    return model


def test_the_process_is_searched_once_for_all_optimizers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Any] = []
    discover = recording.discover
    monkeypatch.setattr(recording, "discover", lambda *args: searches.append(args) or discover(*args))
    unobserved = train()
    calls: list[StepObserver] = []
    with StepObserver(source="command", steps=STEPS, on_call=calls.append) as observer:
        observed = train()
    assert len(searches) == 1
    assert all(torch.equal(*pair) for pair in zip(unobserved.parameters(), observed.parameters(), strict=True))
    facts = observer.facts()
    names = [name for name, _ in observed.named_parameters()]
    assert [step.step for step in facts.steps] == list(range(1, STEPS + 1))
    assert sorted(tensor.name for tensor in facts.stepped) == sorted(names)
    assert all(tensor.live and tensor.gradient_dtype == "float32" for tensor in facts.stepped)
    assert {parameter.gradient for parameter in facts.parameters} == {"float32"}
    assert len(calls) == STEPS * len(names)


def test_operations_are_not_recorded_from_inside_the_backward_pass() -> None:
    """Autograd restores the dispatch modes of the forward pass afterwards: the observer's would get lost, or stay."""
    with StepObserver(source="command", steps=STEPS) as observer:
        train()
    assert _get_current_dispatch_mode() is None
    assert observer.facts().missing["products"] == "the training steps its optimizers inside the backward pass"
