"""Tensors as they are stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchbox.observer.observer import StepObserver

quantised = pytest.importorskip("torchao.optim.subclass_8bit", reason="needs the extra lowbit")


class Blockwise(torch.optim.Optimizer):
    """Signed gradients, beside a state that refuses to be indexed as its shape suggests."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("exp_avg", quantised.OptimState8bit.zeros(parameter.shape))
                parameter -= group["lr"] * parameter.grad.sign()


def test_quantised_state_is_counted_as_it_is_stored_and_does_not_stop_the_observer() -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = Blockwise([weight])
    with StepObserver(source="command", steps=3) as observer:
        for _ in range(3):
            weight.grad = weight.detach().clone()
            optimizer.step()
    facts = observer.facts()
    assert facts.problems == ()
    (entry,) = [entry for entry in facts.entries if entry.kind == "exp_avg"]
    blocks = 64 * 64 // 256
    assert (entry.dtype, entry.elements, entry.bytes) == ("uint8", 64 * 64, 64 * 64 + 4 * blocks + 4 * 256)
    assert [tensor.state for tensor in facts.stepped] == [{"exp_avg": "uint8"}]
