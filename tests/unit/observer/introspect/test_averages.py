"""Averages of weights that stop moving."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchbox.observer.introspect.averages import AverageWatch
from benchbox.observer.introspect.tensor_sources import TensorSource, attribute_sources, container_sources

if TYPE_CHECKING:
    import pytest


class Shadow:
    def __init__(self, model: nn.Module, scale: float = 1.0) -> None:
        self.weights = {name: (scale * parameter.detach()).bfloat16() for name, parameter in model.named_parameters()}


def ones(in_features: int = 8) -> nn.Linear:
    model = nn.Linear(in_features, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def test_an_average_is_stuck_where_it_lags_behind_its_parameter_and_nowhere_else() -> None:
    """Half of the parameter never moves: there the average is where it belongs, and has no reason to move."""
    model = ones()
    average = model.weight.detach().clone()
    watch = AverageWatch()
    watch.record([model], [TensorSource("key", "average", lambda _: [average])], step=1)
    model.weight.data = torch.tensor([[1.0] * 4 + [2.0] * 4])  # masters may be written back into a new storage
    (facts,) = watch.facts(last_step=3)
    assert (facts.lagging, facts.stuck, facts.written, facts.steps) == (4, 4, False, 3)


def test_an_average_that_is_replaced_at_every_update_is_compared_and_not_kept_alive() -> None:
    model = ones()
    shadow = Shadow(model)
    watch, first = AverageWatch(), weakref.ref(shadow.weights["weight"])
    watch.record([model], attribute_sources([shadow], [model]), step=1)
    nn.init.constant_(model.weight, 2.0)
    for step in (2, 3):
        shadow.weights["weight"] = shadow.weights["weight"].clone()
        (facts,) = watch.facts(last_step=step)
        assert (facts.name, facts.stuck, facts.written) == ("Shadow.weights", 8, step == 3)
        watch.begin_again(step)
    assert first() is None
    del shadow
    watch.begin_again(4)
    assert list(watch.facts(last_step=4)) == []


def test_the_objects_of_the_process_are_looked_through_once_for_all_lists_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may keep the weights of every epoch, or of every client, among a million objects."""
    model = ones()
    copies = [[model.weight.detach().clone()] for _ in range(8)]
    watch, searches = AverageWatch(), []
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(1) or copies)
    watch.record([model], list(container_sources(copies, [model])), step=1)
    watch.begin_again(2)
    assert len(list(watch.facts(last_step=3))) == 8
    assert len(searches) == 3


def test_an_average_is_found_in_a_dict_of_parameters_and_buffers_that_no_object_has() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average = {f"module.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    watch = AverageWatch()
    watch.record([model], container_sources([average, model.state_dict(), {"lr": 1.0}, {}], [model]), step=1)
    assert [facts.parameter for facts in watch.facts(last_step=2)] == names
    del average
    gc.collect()
    assert list(watch.facts(last_step=3)) == []


def test_an_average_of_the_trained_parameters_alone_is_found() -> None:
    model = nn.Sequential(ones().requires_grad_(False), ones(1))
    average = Shadow(model[1])
    watch = AverageWatch()
    watch.record([model], attribute_sources([average], [model]), step=1)
    assert [facts.parameter for facts in watch.facts(last_step=2)] == ["1.weight"]


def test_sums_of_gradients_and_views_of_the_weights_are_no_averages() -> None:
    model = ones()
    view, gradients, average = Shadow(model), Shadow(model, scale=0.0), Shadow(model, scale=0.9)
    view.weights = {"weight": model.weight.detach()}
    watch = AverageWatch()
    watch.record([model], attribute_sources([view, gradients, average], [model]), step=1)
    assert len(list(watch.facts(last_step=2))) == 1


def test_parameters_without_a_shape_and_sparse_tensors_are_no_averages() -> None:
    model = ones()
    lists = [[nn.UninitializedParameter()], [model.weight.detach().to_sparse()]]
    assert list(container_sources(lists, [model])) == []
