"""Parameter names without the parts that wrappers add."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchbox.observer.introspect.names import unwrapped_name
from tests.support.observed_trainings import layers, observe_training


def test_wrapping_does_not_change_names():
    model = layers()
    wrapped = nn.Sequential()
    wrapped.add_module("module", model)  # as DDP and engines do
    assert observe_training(wrapped, torch.optim.AdamW(model.parameters())).stepped[0].name == "0.weight"


@pytest.mark.parametrize("wrapped", ["module.tower.weight", "_fsdp_wrapped_module.tower._checkpoint_wrapped_module.weight"])
def test_wrappers_leave_no_trace_in_names(wrapped):
    assert unwrapped_name(wrapped) == "tower.weight"
