"""Averages of weights that stop moving."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from benchbox.observer.introspect.averages import AverageWatch


def test_an_average_is_stuck_where_it_lags_behind_its_parameter_and_nowhere_else() -> None:
    """Half of the parameter never moves: there the average is where it belongs, and has no reason to move."""
    model = nn.Linear(8, 1, bias=False)
    nn.init.ones_(model.weight)
    average = model.weight.detach().clone()
    watch = AverageWatch()
    watch.record([model], [("average", [average])], step=1)
    model.weight.data = torch.tensor([[1.0] * 4 + [2.0] * 4])  # masters may be written back into a new storage
    (facts,) = watch.facts(last_step=3)
    assert (facts.lagging, facts.stuck, facts.written, facts.steps) == (4, 4, False, 3)


def test_an_average_that_is_replaced_at_every_update_is_not_kept_alive() -> None:
    model = nn.Linear(8, 1, bias=False)
    shadow = {"weight": model.weight.detach().clone()}
    watch, first = AverageWatch(), weakref.ref(shadow["weight"])
    watch.record([model], [("shadow", list(shadow.values()))], step=1)
    shadow["weight"] = shadow["weight"].clone()
    assert first() is None
    assert list(watch.facts(last_step=3)) == []
    watch.begin_again(2)
    assert not watch
