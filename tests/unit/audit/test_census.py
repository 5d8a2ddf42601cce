from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from benchbox.audit.census import CensusTaker
from benchbox.optim.masters import MasterWeightOptimizer

ELEMENTS = 2 * (8 * 8 + 8)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    layers.register_buffer("mean", torch.zeros(3))
    return layers


def taken(model, optimizer, steps=1):
    """The census of the last of some steps."""
    for _ in range(steps):
        taker = CensusTaker(model, optimizer)
        with taker:
            model(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return taker.census


def table(census):
    return {(entry.kind, entry.dtype): (entry.tensors, entry.elements, entry.bytes) for entry in census.entries}


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_adam_counts_parameters_gradients_and_both_moments(dtype, size):
    layers = model(getattr(torch, dtype))
    census = taken(layers, torch.optim.AdamW(layers.parameters()))
    whole = (4, ELEMENTS, ELEMENTS * size)
    assert table(census) == {
        ("parameter", dtype): whole,
        ("gradient", dtype): whole,
        ("buffer", "float32"): (1, 3, 12),
        ("exp_avg", dtype): whole,
        ("exp_avg_sq", dtype): whole,
        ("step", "float32"): (4, 4, 16),
    }
    assert census.rank == 0


def test_masters_are_found_beside_the_16_bit_parameters_they_stand_for():
    layers = model(torch.bfloat16)
    census = taken(layers, MasterWeightOptimizer(layers.parameters(), fused=True), steps=2)
    found = table(census)
    assert found["parameter", "bfloat16"] == found["gradient", "bfloat16"] == (4, ELEMENTS, ELEMENTS * 2)
    assert found["master", "float32"] == found["master_gradient", "float32"] == (4, ELEMENTS, ELEMENTS * 4)
    assert ("parameter", "float32") not in found
    assert [(tensor.name, tensor.dtype, tensor.live) for tensor in census.stepped] == [
        ("0.weight", "float32", False),
        ("0.bias", "float32", False),
        ("1.weight", "float32", False),
        ("1.bias", "float32", False),
    ]
    assert census.optimizer_chain == ("MasterWeightOptimizer", "AdamW")


def test_stepped_tensors_carry_their_groups_betas_and_their_state():
    layers = model()
    groups = [{"params": [layers[0].weight], "betas": (0.9, 0.999)}, {"params": [layers[1].weight], "betas": (0.9, 0.95)}]
    census = taken(layers, torch.optim.AdamW(groups))
    assert {tensor.name: tensor.betas for tensor in census.stepped} == {"0.weight": (0.9, 0.999), "1.weight": (0.9, 0.95)}
    assert census.stepped[0].state == {"step": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}


def test_a_parameter_without_a_gradient_is_not_stepped():
    layers = model()
    layers[0].requires_grad_(requires_grad=False)
    census = taken(layers, torch.optim.AdamW(layers.parameters()))
    assert [tensor.name for tensor in census.stepped] == ["1.weight", "1.bias"]
    assert table(census)["parameter", "float32"][0] == 4


def test_wrapping_does_not_change_names():
    layers = model()
    optimizer = torch.optim.AdamW(layers.parameters())
    wrapped = nn.Sequential()
    wrapped.add_module("module", layers)  # as DDP and engines do
    assert next(tensor.name for tensor in taken(wrapped, optimizer).stepped) == "0.weight"


def test_a_flat_tensor_that_live_parameters_view_is_no_master():
    """Stepping it is stepping them."""
    layers = model(torch.bfloat16)
    flat = nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.bfloat16))
    for parameter, part in zip(layers.parameters(), flat.detach().split([64, 8, 64, 8]), strict=True):
        parameter.data = part.view_as(parameter)
    flat.grad = torch.ones_like(flat)
    census = taken(layers, torch.optim.AdamW([flat]))
    assert [tensor.live for tensor in census.stepped] == [True]
    assert not {"master", "master_gradient"} & {entry.kind for entry in census.entries}


def test_an_optimizer_of_unknown_arithmetic_is_opaque():
    class Homemade(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    layers = model()
    census = taken(layers, Homemade(layers.parameters()))
    assert [opaque.optimizer for opaque in census.opaque] == ["Homemade"]
    assert "unknown" in census.opaque[0].reason


def test_an_optimizer_that_no_hook_sees_is_opaque():
    class Duck:
        """Steps, but is no torch optimizer."""

        def __init__(self, parameters):
            self.parameters = list(parameters)

        def step(self):
            for parameter in self.parameters:
                parameter.data -= parameter.grad

        def zero_grad(self):
            for parameter in self.parameters:
                parameter.grad = None

    layers = model()
    census = taken(layers, Duck(layers.parameters()))
    assert census.stepped == ()
    assert "no step" in census.opaque[0].reason


def test_stochastic_rounding_and_kahan_buffers_are_recognised():
    class Rounding(torch.optim.SGD):
        bf16_stochastic_round = True

    class Kahan(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].setdefault("kahan_comp", torch.zeros_like(parameter))
            return super().step(closure)

    for kind, name in ((Rounding, "stochastic rounding"), (Kahan, "Kahan")):
        layers = model(torch.bfloat16)
        census = taken(layers, kind(layers.parameters(), lr=0.1))
        assert all(name in tensor.compensation for tensor in census.stepped)
        assert census.opaque == ()


def test_a_step_that_fails_leaves_no_hooks_behind():
    layers = model()
    optimizer = torch.optim.AdamW(layers.parameters())
    before = list(_global_optimizer_pre_hooks)
    taker = CensusTaker(layers, optimizer)
    with pytest.raises(RuntimeError), taker:
        raise RuntimeError
    assert list(_global_optimizer_pre_hooks) == before
