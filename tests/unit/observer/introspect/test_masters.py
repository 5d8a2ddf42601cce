"""Masters and compensation of rounding that the observer recognises in optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchbox.observer.observer import StepObserver
from benchbox.optim.masters import MasterWeightOptimizer
from tests.support.observed_trainings import ELEMENTS, census_table, layers, observe_training, train_masters


def test_masters_are_found_beside_the_16_bit_parameters_they_stand_for():
    model = layers(torch.bfloat16)
    facts = observe_training(model, MasterWeightOptimizer(model.parameters(), fused=True))
    census = census_table(facts)
    assert census["parameter", "bfloat16"] == census["gradient", "bfloat16"] == (4, ELEMENTS, ELEMENTS * 2)
    assert census["master", "float32"] == census["master_gradient", "float32"] == (4, ELEMENTS, ELEMENTS * 4)
    assert ("parameter", "float32") not in census
    assert [(tensor.name, tensor.dtype, tensor.live, tensor.live_dtype) for tensor in facts.stepped] == [
        (name, "float32", False, "bfloat16") for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    ]
    assert facts.optimizer_chain == ("MasterWeightOptimizer", "AdamW")
    assert all(tensor.numbers.live_differs == 0.0 for tensor in facts.stepped)


def test_masters_of_an_unknown_optimizer_are_recognised_by_their_shapes():
    """A wrapper that is no torch optimizer and keeps masters in a list: they are linked, and stale ones are detected."""

    class Wrapper:
        def __init__(self, parameters):
            self.live = list(parameters)
            self.copies = [parameter.detach().float() for parameter in self.live]
            self.real = torch.optim.AdamW(self.copies, lr=1e-2)

        def step(self):
            for parameter, master in zip(self.live, self.copies, strict=True):
                master.grad = parameter.grad.float()
            self.real.step()
            for parameter, master in zip(self.live, self.copies, strict=True):
                parameter.data.copy_(master)

        def zero_grad(self):
            for parameter in self.live:
                parameter.grad = None

    model = layers(torch.bfloat16)
    optimizer = Wrapper(model.parameters())
    facts = observe_training(model, optimizer)
    assert facts.optimizer_chain == ("Wrapper", "AdamW")
    assert [(tensor.name, tensor.live_dtype) for tensor in facts.stepped][:2] == [
        ("0.weight", "bfloat16"),
        ("0.bias", "bfloat16"),
    ]
    assert all(tensor.numbers.live_differs_first == tensor.numbers.live_differs == 0.0 for tensor in facts.stepped)
    assert all(parameter.linked for parameter in facts.parameters)

    with torch.no_grad():
        model[0].weight.zero_()  # weights loaded behind the masters' back
    facts = observe_training(model, optimizer)
    stale = {tensor.name: tensor.numbers.live_differs_first for tensor in facts.stepped}
    assert stale["0.weight"] == 1.0
    assert stale["1.weight"] == 0.0


@pytest.mark.parametrize(("factor", "differs"), [(1.0, 0.0), (2.0, 1.0)])
def test_parameters_may_get_a_new_storage_from_their_masters_at_every_step(factor, differs):
    """The assignment replaces what a parameter refers to: compared is what it refers to now."""
    model = layers(torch.bfloat16)
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters)

    def write_back(parameter, master):
        parameter.data = factor * master.data.bfloat16()

    with StepObserver(source="command", steps=3) as observer:
        train_masters(model, masters, optimizer, 4, write_back)
    assert {tensor.numbers.live_differs for tensor in observer.facts().stepped} == {differs}


def test_a_flat_tensor_that_live_parameters_view_is_no_master():
    """Stepping the flat tensor steps the parameters."""
    model = layers(torch.bfloat16)
    flat = nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.bfloat16))
    for parameter, part in zip(model.parameters(), flat.detach().split([64, 8, 64, 8]), strict=True):
        parameter.data = part.view_as(parameter)
    optimizer = torch.optim.AdamW([flat])
    with StepObserver(source="command", steps=2) as observer:
        for _ in range(2):
            model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
            flat.grad = torch.ones_like(flat)
            optimizer.step()
    facts = observer.facts()
    assert [tensor.live for tensor in facts.stepped] == [True]
    assert not {"master", "master_gradient"} & {entry.kind for entry in facts.entries}


def test_stochastic_rounding_kahan_buffers_and_masters_in_the_state_are_recognised():
    class Rounding(torch.optim.SGD):
        bf16_stochastic_round = True

    class Kahan(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].setdefault("kahan_comp", torch.zeros_like(parameter))
            return super().step(closure)

    class WithMasters(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].setdefault("master_param", parameter.detach().float())
            return super().step(closure)

    for kind, name in (
        (Rounding, "stochastic rounding"),
        (Kahan, "Kahan buffer kahan_comp"),
        (WithMasters, "state master_param in float32"),
    ):
        model = layers(torch.bfloat16)
        facts = observe_training(model, kind(model.parameters(), lr=0.1))
        assert [tensor.compensation for tensor in facts.stepped] == [name] * 4
        assert facts.opaque == ()
