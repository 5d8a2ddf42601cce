"""Compiled passes of optimizers in traces of torch's profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from benchbox.optim import passes

if TYPE_CHECKING:
    import pytest


def test_a_pass_is_an_operation_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels belong to the innermost operation: an annotation of the user would have none of those that the pass starts."""
    monkeypatch.setattr(passes, "pass_listeners", [lambda read, written: None])
    with profile(activities=[ProfilerActivity.CPU]) as profiler, passes.announced("adamw", lambda: ((), ())):
        torch.ones(3)
    (event,) = (event for event in profiler.events() if event.name == "benchbox::adamw")
    assert not event.is_user_annotation
    assert [child.name for child in event.cpu_children] == ["aten::ones"]
