"""Failures of the observer inside calls of the training, which must return as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from benchbox.observer.hooks import calls, forward
from benchbox.observer.hooks.collectives import CollectiveCounter
from benchbox.observer.hooks.matmuls import MatmulDtypes
from benchbox.observer.observer import StepObserver
from tests.support.observed_trainings import layers


def train(steps: int = 6) -> list[torch.Tensor]:
    """Train with a clipping, a scaler and a load of optimizer state in each step; return the weights."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(steps):
        torch.manual_seed(step)
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        scaler.unscale_(optimizer)
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) > 0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    return [parameter.detach() for parameter in model.parameters()]


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("in the observer")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (calls, "_parameter_ids"),
        (calls, "_overflowed"),
        (calls, "_state_dtypes"),
        (calls, "Clip"),
        (forward, "_current_autocast"),
        (CollectiveCounter, "is_relevant"),
        (MatmulDtypes, "is_relevant"),
        (MatmulDtypes, "on_operation"),
    ],
    ids=lambda part: part if isinstance(part, str) else part.__name__.rpartition(".")[2],
)
def test_a_failure_inside_a_call_of_the_training_is_reported_and_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    expected = train()
    monkeypatch.setattr(owner, name, staticmethod(fail) if isinstance(owner, type) else fail)
    with StepObserver(source="command", steps=6) as observer:
        weights = train()
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
    (problem,) = observer.facts().problems
    assert "ZeroDivisionError: in the observer" in problem
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(("steps", "reported_in"), [(6, "begin_step"), (3, "_finish")])
def test_a_failure_inside_an_operation_is_reported_outside_of_it(
    monkeypatch: pytest.MonkeyPatch, steps: int, reported_in: str
) -> None:
    """The mode cannot be left inside of an operation: at the next step, or where the observer is removed, it can."""
    monkeypatch.setattr(CollectiveCounter, "is_relevant", staticmethod(fail))
    with StepObserver(source="command", steps=6) as observer:
        train(steps)
    assert observer.facts().problems[0].startswith(f"{reported_in}: ")
    assert observer.steps_observed == 3


def test_an_exception_of_the_training_passes_through_a_guarded_call() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with StepObserver(source="command", steps=6) as observer:
        model(torch.full((2, 8), torch.inf)).sum().backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        with pytest.raises(KeyError):
            optimizer.load_state_dict({})
    assert observer.facts().problems == ()
