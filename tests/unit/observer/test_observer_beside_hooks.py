"""The observer beside optimizer hooks that are not its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from benchbox.observer.observer import StepObserver

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def process_of_its_own() -> Iterator[None]:
    """An observer that leaves in the middle of others may leave one hook that does nothing; the tests that follow have none."""
    hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    before = [dict(each) for each in hooks]
    yield
    for each, held in zip(hooks, before, strict=True):
        each.clear()
        each.update(held)


@pytest.mark.usefixtures("process_of_its_own")
def test_hooks_that_follow_those_of_the_observer_are_called_when_it_leaves_in_the_middle_of_them():
    """torch raises when hooks are removed while it goes through them, and one that is last in line hides that."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    called = []
    observer = StepObserver(source="command", steps=2)
    observer.install()
    others = [
        register_optimizer_step_pre_hook(lambda *_: called.append("before")),
        register_optimizer_step_post_hook(lambda *_: called.append("after")),
    ]
    try:
        for _ in range(5):
            weight.grad = torch.ones(4)
            optimizer.step()
    finally:
        for other in others:
            other.remove()
    assert called == ["before", "after"] * 5
    assert len(observer.facts().steps) == 2
