"""The observer beside optimizer hooks that are not its own."""

from __future__ import annotations

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from benchbox.observer.observer import StepObserver


@pytest.mark.usefixtures("restored_hooks")
def test_hooks_registered_after_the_observer_are_called_when_it_is_removed_by_one_of_its_own():
    """torch raises when hooks are removed while it iterates over them, unless the removed one is the last."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    called = []
    observer = StepObserver(source="command", steps=2)
    observer.install()
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("before")),
        register_optimizer_step_post_hook(lambda *_: called.append("after")),
    ]
    try:
        for _ in range(5):
            weight.grad = torch.ones(4)
            optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert called == ["before", "after"] * 5
    assert len(observer.facts().steps) == 2
