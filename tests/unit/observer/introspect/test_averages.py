"""Averages of weights that stop moving."""

from __future__ import annotations

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
