"""The state of a prepared policy: what is in it, and optimizer state that is created to be overwritten."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchbox.backends.state import create_optimizer_state, model_state, optimizer_parts


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_creating_optimizer_state_changes_no_weight_no_rate_and_leaves_no_gradient(lr: float | Tensor) -> None:
    """Weight decay multiplies by the rate."""
    created, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([created, other], lr=lr, weight_decay=0.5)
    create_optimizer_state(optimizer, [created])
    assert set(optimizer.state[created]) == {"step", "exp_avg", "exp_avg_sq"}
    assert other not in optimizer.state
    assert optimizer.param_groups[0]["lr"] is lr
    assert created.grad is None
    assert torch.equal(created, torch.ones(3))


def test_frozen_are_those_that_neither_train_nor_are_stepped() -> None:
    """A backbone that begins frozen is stepped later, and a parameter may be stepped by another rank alone."""
    model = nn.ModuleDict(
        {name: nn.Linear(1, 1, bias=False) for name in ("trained", "frozen", "thawed_later", "of_another_rank")}
    )
    for name in ("frozen", "thawed_later"):
        model[name].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW([model["trained"].weight, model["thawed_later"].weight])
    state = model_state(model, list(optimizer_parts(model, optimizer)))
    assert [part.name for part in state.stepped] == ["trained.weight", "thawed_later.weight"]
    assert list(state.frozen) == ["frozen.weight"]
