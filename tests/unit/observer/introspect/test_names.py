"""Parameter names without the parts that wrappers add."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from benchbox.observer.introspect.names import live_parameters, unwrapped_name
from tests.support.observed_trainings import layers, observe_training


def test_wrapping_does_not_change_names():
    model = layers()
    wrapped = nn.Sequential()
    wrapped.add_module("module", model)  # as DDP and engines do
    assert observe_training(wrapped, torch.optim.AdamW(model.parameters())).stepped[0].name == "0.weight"


@pytest.mark.parametrize("wrapped", ["module.tower.weight", "_fsdp_wrapped_module.tower._checkpoint_wrapped_module.weight"])
def test_wrappers_leave_no_trace_in_names(wrapped):
    assert unwrapped_name(wrapped) == "tower.weight"


class Own(nn.Module):
    """A model with a part that has the name that wrappers give to what they wrap."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)


def test_a_part_named_module_keeps_its_name_within_a_model():
    expected = ["module.weight", "module.bias", "head.weight", "head.bias"]
    assert [name for name, _ in live_parameters(Own())] == expected
    wrapped = nn.Sequential()
    wrapped.add_module("module", Own())  # as DDP and engines do
    assert [name for name, _ in live_parameters(wrapped)] == expected


def test_wrappers_of_a_part_leave_no_trace_in_the_names_of_a_model():
    model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)), Own())
    names = [name for name, _ in live_parameters(model)]
    assert names == ["0.weight", "0.bias", "1.module.weight", "1.module.bias", "1.head.weight", "1.head.bias"]


def test_checkpoint_wrappers_leave_no_trace_in_the_names_of_a_model():
    model = nn.Sequential(checkpoint_wrapper(Own()), nn.Linear(2, 2))
    names = [name for name, _ in live_parameters(model)]
    assert names == ["0.module.weight", "0.module.bias", "0.head.weight", "0.head.bias", "1.weight", "1.bias"]
