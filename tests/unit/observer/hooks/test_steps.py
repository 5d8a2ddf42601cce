"""Begin of a training: optimizer calls that are no training step, and optimizers that start later."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from benchbox.observer.observer import StepObserver


def test_the_step_by_which_a_checkpoint_creates_state_is_no_training_step() -> None:
    """set_optimizer_state_dict steps once with gradients of zero before it loads."""
    model = nn.Linear(4, 4)
    former = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 4)).sum().backward()
    former.step()
    saved = get_optimizer_state_dict(model, former)
    model.zero_grad()

    calls = []
    with StepObserver(source="command", steps=3) as observer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        set_optimizer_state_dict(model, optimizer, saved)
        assert calls, "torch no longer steps here: this test shows nothing"
        for _ in range(3):
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    facts = observer.facts()
    assert [step.micro_batches for step in facts.steps if step.micro_batches is not None] == [1, 1, 1]
    assert {tensor.numbers.steps_before for tensor in facts.stepped} == {1}


def test_a_step_without_gradients_before_the_first_forward_pass_is_no_training_step() -> None:
    """Scripts take it to be spared the warning of a schedule that advances before its optimizer."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with StepObserver(source="command", steps=3) as observer:
        optimizer.step()
        for _ in range(3):
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.micro_batches for step in observer.facts().steps if step.micro_batches is not None] == [1, 1, 1]


def test_an_optimizer_that_starts_later_adds_its_model_to_the_earlier_ones() -> None:
    """A critic that is trained from the second step on, when no forward hooks are installed."""
    actor, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    actor_optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    with StepObserver(source="command", steps=6) as observer:
        for step in range(6):
            critic(actor(torch.ones(1, 4))).sum().backward()
            actor_optimizer.step()
            if step > 0:
                critic_optimizer.step()
            actor.zero_grad()
            critic.zero_grad()
    facts = observer.facts()
    assert sorted(tensor.name for tensor in facts.stepped) == ["bias", "bias", "weight", "weight"]
    assert all(tensor.live for tensor in facts.stepped)
    assert len(facts.parameters) == 4


def test_a_step_that_raised_does_not_wrap_the_optimizer_that_steps_next() -> None:
    """A hook that raises skips a step, for example. An optimizer that is taken for a wrapper has no facts."""
    skipped = [False, False, True, False, False, False]

    def skip(*_: Any) -> None:
        if skipped.pop(0):
            raise FloatingPointError

    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with StepObserver(source="command", steps=6) as observer:
        first_optimizer = torch.optim.AdamW(first.parameters())
        first_optimizer.register_step_pre_hook(skip)
        second_optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
        for is_skipped in tuple(skipped):
            second(first(torch.ones(1, 4))).sum().backward()
            if is_skipped:
                with pytest.raises(FloatingPointError):
                    first_optimizer.step()
            else:
                first_optimizer.step()
            second_optimizer.step()
            first.zero_grad()
            second.zero_grad()
    facts = observer.facts()
    assert [tensor.optimizer for tensor in facts.stepped] == ["AdamW", "AdamW", "SGD", "SGD"]
    assert {name for step in facts.steps[3:] for name in step.rates} == {"AdamW", "SGD"}


class PoolOptimizer(torch.optim.Optimizer):
    """Steps the optimizers of several parts in a pool."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.parts = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    def step(self, closure: object = None) -> None:
        with ThreadPoolExecutor(1) as pool:
            list(pool.map(lambda optimizer: optimizer.step(), self.parts))


@pytest.mark.usefixtures("restored_hooks")
def test_an_optimizer_that_steps_others_in_a_pool_wraps_them() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = PoolOptimizer(torch.optim.AdamW(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1))
    with StepObserver(source="command", steps=4) as observer:
        for _ in range(5):
            second(first(torch.ones(1, 4))).sum().backward()
            optimizer.step()
    facts = observer.facts()
    assert facts.optimizer_chain == ("PoolOptimizer", "AdamW")
    assert (facts.opaque, [step.step for step in facts.steps]) == ((), [1, 2, 3, 4])


@pytest.mark.usefixtures("restored_hooks")
def test_an_optimizer_whose_closure_steps_another_one_in_a_thread_is_observed() -> None:
    """On a GPU, autograd calls the hooks of the backward pass in the thread of the device."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    inner, outer = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(second.parameters())

    def step_inner(_: object) -> None:
        thread = threading.Thread(target=inner.step)
        thread.start()
        thread.join()

    def closure() -> torch.Tensor:
        outer.zero_grad()
        loss = second(first(torch.ones(1, 4))).sum()
        loss.backward()
        return loss

    first.weight.register_post_accumulate_grad_hook(step_inner)
    with StepObserver(source="command", steps=3) as observer:
        for _ in range(5):
            outer.step(closure)
    assert {tensor.optimizer for tensor in observer.facts().stepped} == {"SGD", "AdamW"}
