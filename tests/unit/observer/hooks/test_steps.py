"""Begin of a training: optimizer calls that are no training step, and optimizers that start later."""

from __future__ import annotations

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
