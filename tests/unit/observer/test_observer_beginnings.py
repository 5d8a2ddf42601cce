"""How a training begins: steps that are none of it, and optimizers that come later."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from benchbox.observer.observer import StepObserver


def test_the_step_by_which_a_checkpoint_makes_room_for_state_is_no_step_of_the_training() -> None:
    """set_optimizer_state_dict steps once with gradients of zero before it loads."""
    model = nn.Linear(4, 4)
    former = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 4)).sum().backward()
    former.step()
    saved = get_optimizer_state_dict(model, former)
    model.zero_grad()

    taken = []
    with StepObserver(source="command", steps=3) as observer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: taken.append(1))
        set_optimizer_state_dict(model, optimizer, saved)
        assert taken, "torch no longer steps here: this test shows nothing"
        for _ in range(3):
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    facts = observer.facts()
    assert [step.micro_batches for step in facts.steps if step.micro_batches is not None] == [1, 1, 1]
    assert {tensor.numbers.steps_before for tensor in facts.stepped} == {1}


def test_an_optimizer_that_begins_later_finds_its_model_and_keeps_the_former_one() -> None:
    """A critic that is trained from the second step on, when nobody watches forward passes."""
    actor, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    first = torch.optim.SGD(actor.parameters(), lr=0.1)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    with StepObserver(source="command", steps=6) as observer:
        for step in range(6):
            critic(actor(torch.ones(1, 4))).sum().backward()
            first.step()
            if step > 0:
                second.step()
            actor.zero_grad()
            critic.zero_grad()
    facts = observer.facts()
    assert sorted(tensor.name for tensor in facts.stepped) == ["bias", "bias", "weight", "weight"]
    assert all(tensor.live for tensor in facts.stepped)
    assert len(facts.parameters) == 4
