"""The trace of a step on fake tensors, against the same step for real."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchbox.estimation.fake import make_fake, make_fake_batch, new_fake_mode
from benchbox.estimation.tracing import trace_step
from benchbox.measure.flops import FlopCounter
from benchbox.measure.memory import TensorStorageTracker

SIGNS = {"allocate": 1, "free": -1}  # of the bytes of activations


class Layers(nn.Module):
    """Three layers; a mask in the batch decides whether the last one runs."""

    def __init__(self, *, checkpointing):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.checkpointing = checkpointing

    def forward(self, batch):
        hidden = batch["inputs"]
        for index, layer in enumerate(self.layers):
            if index == 2 and not bool(batch["mask"].any()):
                break
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.checkpointing else layer(hidden)
        return SimpleNamespace(total=hidden.square().mean())


def batch_of(*, mask):
    return {"inputs": torch.randn(512, 64), "mask": torch.tensor([mask])}


def traced(model, batch):
    mode, model = new_fake_mode(), deepcopy(model)
    make_fake(model, mode)
    units = {module: name for name, module in model.named_modules() if isinstance(module, nn.Sequential)}
    return trace_step(model, make_fake_batch(batch, mode), mode, units=units, autocast=None)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_trace_needs_the_memory_and_the_products_of_the_real_step(checkpointing, mask):
    """To the byte: the peak of activations and gradients, with and without recomputation, and with a branch on data."""
    model, batch = Layers(checkpointing=checkpointing), batch_of(mask=mask)
    timeline = traced(model, batch)
    flops = FlopCounter()
    tracker = TensorStorageTracker([*model.parameters(), *batch.values()], [flops])
    before = tracker.current_bytes
    with tracker:
        model(batch).total.backward()
    sizes = [parameter.nbytes for parameter in model.parameters()]
    current = peak = 0
    for event in timeline.events:
        if event.kind == "gradient":
            current += sizes[event.size]
        elif event.kind in ("allocate", "free"):
            current += event.size if event.kind == "allocate" else -event.size
        peak = max(peak, current)
    assert peak == tracker.peak_bytes - before
    assert (timeline.model_flops, timeline.recomputed_flops) == (flops.total - flops.recomputed, flops.recomputed)
    assert (timeline.recomputed_flops > 0) == checkpointing


def test_checkpointing_keeps_less_at_the_end_of_forward():
    def kept(checkpointing):
        timeline = traced(Layers(checkpointing=checkpointing), batch_of(mask=True))
        end = next(index for index, event in enumerate(timeline.events) if event.kind == "forward_end")
        return sum(SIGNS.get(event.kind, 0) * event.size for event in timeline.events[:end])

    assert kept(True) < kept(False) / 4


def test_gradients_are_complete_from_the_last_layer_to_the_first():
    timeline = traced(Layers(checkpointing=False), batch_of(mask=True))
    assert [number // 4 for number in timeline.gradients] == [2] * 4 + [1] * 4 + [0] * 4


def test_backward_enters_the_layers_that_forward_left_in_reverse():
    timeline = traced(Layers(checkpointing=False), batch_of(mask=True))
    left = [event.name for event in timeline.events if event.kind == "leave"]
    entered = [event.name for event in timeline.events if event.kind == "enter_backward"]
    assert entered == left[::-1] == ["layers.2", "layers.1", "layers.0"]


def test_a_trace_leaves_nothing_behind():
    """Neither hooks nor gradients: the same fake policy can be traced again."""
    model, mode = Layers(checkpointing=False), new_fake_mode()
    make_fake(model, mode)
    names = {module: name for name, module in model.named_modules()}
    first, second, without = (
        trace_step(model, make_fake_batch(batch_of(mask=True), mode), mode, units={}, autocast=None, uses=uses)
        for uses in (names, names, None)
    )
    assert first.events == second.events
    assert first.uses != without.uses == ()
    assert all(parameter.grad is None for parameter in model.parameters())
