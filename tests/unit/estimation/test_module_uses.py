"""Uses of modules as the hooks of ZeRO-3 see them. `tests/integration/test_zero3_order.py` has DeepSpeed's own beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple, get_origin

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchbox.estimation.module_uses import ModuleUses
from benchbox.estimation.tracing import list_tensors


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Branches(nn.Module):
    """Returns its input through a layer in any container, beside what is no tensor."""

    def __init__(self, container):
        super().__init__()
        self.layer, self.container = nn.Linear(4, 4), container

    def forward(self, hidden):
        return self.container(self.layer(hidden), hidden)


class Reader(nn.Module):
    """Reads the weight of another module, without calling it."""

    def __init__(self, other):
        super().__init__()
        self.bias, self._other = nn.Parameter(torch.zeros(4)), [other]

    def forward(self, hidden):
        return nn.functional.linear(hidden, self._other[0].weight, self.bias)


def traced(model, *inputs):
    """Return the uses of the modules of a step, the parameters that they read from elsewhere, and what the step returned."""
    uses = []
    names = {module: name or "root" for name, module in model.named_modules()}
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    recorder = ModuleUses(names, numbers, lambda kind, name: uses.append((kind, name)))
    with recorder.recording():
        outputs = model(*inputs)
        sum(tensor.sum() for tensor in list_tensors([outputs])).backward()
    return uses, recorder.external, outputs


def test_a_module_is_used_when_it_is_called_and_when_its_gradients_arrive_and_leave():
    """The first layer returns in forward alone: its input has no gradient."""
    uses, _, _ = traced(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4))
    assert uses == [
        ("call", "root"),
        *((kind, layer) for layer in "01" for kind in ("call", "return")),
        ("return", "root"),
        *(("call_backward", name) for name in ("root", "1")),
        ("return_backward", "1"),
        ("call_backward", "0"),
    ]


def test_every_tensor_that_is_returned_begins_the_backward_of_its_module():
    """In a list, a tuple or a dictionary, whose type is kept, also within another and beside something else."""
    containers = {
        list: lambda *pair: [*pair],
        tuple: lambda *pair: (*pair, "text"),
        Pair: Pair,
        dict: lambda *pair: dict(zip("ab", pair, strict=True)),
        list[list]: lambda first, second: [first, [second]],
    }
    for kind, container in containers.items():
        uses, _, outputs = traced(Branches(container), torch.ones(2, 4, requires_grad=True))
        assert type(outputs) is (get_origin(kind) or kind)
        assert uses.count(("call_backward", "root")) == 2
        assert uses.count(("return_backward", "root")) == 1


def test_what_a_module_returns_in_an_object_begins_no_backward():
    class Object(nn.Module):
        def forward(self, hidden):
            return SimpleNamespace(hidden=hidden)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.object = Object()

        def forward(self, hidden):
            return self.object(hidden).hidden

    uses, _, _ = traced(Model(), torch.ones(2, 4, requires_grad=True))
    assert [kind for kind, name in uses if name == "object"] == ["call", "return", "return_backward"]


def test_the_backward_of_a_module_that_is_called_twice_returns_once():
    """The count of inputs begins anew with every call, and the last call is the first that backward reaches."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, hidden):
            return self.layer(self.layer(hidden))

    uses, _, _ = traced(Twice(), torch.ones(2, 4, requires_grad=True))
    layer = [kind for kind, name in uses if name == "layer"]
    assert layer == ["call", "return"] * 2 + ["call_backward", "return_backward", "call_backward"]


def test_a_forward_that_backward_repeats_is_a_call_again():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, hidden):
            return checkpoint(self.layer, hidden, use_reentrant=False)

    uses, external, _ = traced(Checkpointed(), torch.ones(2, 4, requires_grad=True))
    assert [kind for kind, name in uses if name == "layer"].count("call") == 2
    assert external == {}


def test_a_parameter_that_a_module_reads_elsewhere_is_its_own_too():
    """Unless its module is being called, or another that has it already."""
    layer = nn.Linear(4, 4, bias=False)
    outside = nn.ModuleDict({"layer": layer, "reader": Reader(layer)})
    outside.forward = lambda hidden: outside["reader"](outside["layer"](hidden))
    assert traced(outside, torch.ones(2, 4))[1] == {"reader": (0,)}
    within = nn.Sequential(layer)
    within.append(nn.Sequential(nn.ReLU(), Reader(layer)))
    assert traced(within, torch.ones(2, 4))[1] == {"1.1": (0,)}
    layer.forward = lambda hidden: reader(hidden)
    reader = Reader(layer)
    layer.reader = reader
    assert traced(layer, torch.ones(2, 4))[1] == {}


def test_an_input_without_a_gradient_is_not_waited_for():
    uses, _, _ = traced(nn.Bilinear(4, 4, 4), torch.ones(2, 4, requires_grad=True), torch.ones(2, 4))
    assert uses == [("call", "root"), ("return", "root"), ("call_backward", "root"), ("return_backward", "root")]


def test_a_parameter_that_is_read_outside_of_all_modules_belongs_to_none():
    layer = nn.Linear(4, 4)
    recorder = ModuleUses({layer: "layer"}, dict.fromkeys(layer.parameters(), 0), lambda kind, name: None)
    with recorder.recording():
        assert layer.weight.shape == (4, 4)
    assert recorder.external == {}


def test_nothing_stays_behind():
    """Neither hooks nor the dictionaries that watch parameters, and gradients are those without any of it."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(2, 4)
    traced(model, inputs)
    watched = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(inputs).sum().backward()
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), watched, strict=True))
    assert all(type(module._parameters) is dict for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
