"""Steps that are none of the training's."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from benchbox.measure.witness.witness import Witness


def test_the_step_by_which_a_checkpoint_makes_room_for_state_is_no_step_of_the_training() -> None:
    """set_optimizer_state_dict steps once with gradients of zero before it loads."""
    model = nn.Linear(4, 4)
    former = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 4)).sum().backward()
    former.step()
    saved = get_optimizer_state_dict(model, former)
    model.zero_grad()

    taken = []
    with Witness(source="command", steps=3) as witness:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: taken.append(1))
        set_optimizer_state_dict(model, optimizer, saved)
        assert taken, "torch no longer steps here: this test shows nothing"
        for _ in range(3):
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    facts = witness.facts()
    assert [step.micro_batches for step in facts.steps if step.micro_batches is not None] == [1, 1, 1]
    assert {tensor.numbers.steps_before for tensor in facts.stepped} == {1}
