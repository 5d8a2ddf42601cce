"""Objects of a script that are found through others."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from benchbox.observer.introspect.discovery import discover
from benchbox.observer.introspect.masters import declared_offload
from benchbox.observer.introspect.tensor_sources import read_sources

if TYPE_CHECKING:
    from collections.abc import Callable


class CPUOffloadOptimizer:
    """Holds its optimizers as torchao's class of this name does, which needs a GPU: one for each parameter, in a dict."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optim_dict = {optimizer.param_groups[0]["params"][0]: optimizer for optimizer in optimizers}

    def step(self) -> None:
        for optimizer in self.optim_dict.values():
            optimizer.step()


class ChainedOptimizer:
    """Holds its optimizers as Megatron's class of this name does: in a list."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.chained_optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.chained_optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    ("wrap", "offload"),
    [(CPUOffloadOptimizer, "CPUOffloadOptimizer offloads its optimizer state"), (ChainedOptimizer, None)],
)
def test_a_wrapper_of_several_optimizers_is_found_around_each(wrap: Callable[..., object], offload: str | None) -> None:
    model = nn.Linear(2, 2)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW([parameter]) for parameter in model.parameters()]
    wrapper = wrap(optimizers)
    objects = discover(optimizers, [model])
    for optimizer in optimizers:
        chain = objects.chain(optimizer)
        assert chain == [wrapper, optimizer]
        assert declared_offload(chain) == offload


class ModelEma:
    """Holds the averages by name, as those that people write do, and has no `step`."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Schema(ModelEma):
    pass


@pytest.mark.parametrize(("kind", "name"), [(ModelEma, "ModelEma.shadow"), (Schema, "a dict of tensors")])
def test_tensors_by_name_may_be_averages_and_have_the_name_of_an_object_that_is_called_one(
    kind: type[ModelEma], name: str
) -> None:
    model = nn.Linear(2, 2)
    owner = kind(model)
    objects = discover([torch.optim.AdamW(model.parameters())], [model])
    tensors = read_sources(objects.others)
    names = [
        source.name
        for source, averages in zip(objects.others, tensors, strict=True)
        if any(average is owner.shadow["weight"] for average in averages)
    ]
    assert names[0] == name


class Unanswering(type):
    def __getattr__(cls, name: str) -> object:
        raise RuntimeError(name)


class Slotted(metaclass=Unanswering):
    __slots__ = ()

    def step(self) -> None: ...


def test_classes_whose_metaclass_answers_nothing_do_not_stop_the_search() -> None:
    model, trainer = nn.Linear(2, 2), Slotted()
    assert discover([torch.optim.AdamW(model.parameters())], [model], [trainer]).models == [model]


def test_masters_in_a_list_are_no_averages() -> None:
    model = nn.Linear(2, 2)
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    objects = discover([torch.optim.AdamW(masters)], [model])
    assert not any(tensor is masters[0] for tensors in read_sources(objects.others) for tensor in tensors)


def test_models_are_in_the_order_in_which_they_were_called() -> None:
    first = nn.Linear(2, 2)
    gc.collect()  # lists older objects after new ones
    second = nn.Linear(2, 2)
    never_called = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters(), *never_called.parameters()])
    assert discover([optimizer], [first, second]).models == [first, second, never_called]
    assert discover([optimizer], [second, first]).models == [second, first, never_called]
