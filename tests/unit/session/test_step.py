"""The training step as instruments see it."""

from __future__ import annotations

from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.errors import DataError
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.session.build import build_cell_policy, build_session, open_cell_data
from benchbox.spec.cell import Cell, DataSpec, OptimSpec
from benchbox.spec.optim import SpikeSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

CELL = Cell(policy="pi05", size="tiny", backend="single", world_size=1, batch=2, data=DataSpec(kind="synthetic", workers=0))


class StepWatcher:
    """Instrument that counts the tensor operations inside a step, and records those outside of it."""

    def __init__(self) -> None:
        self.inside = 0
        self.phases: list[str] = []
        self.outside: list[str] = []
        self._running = False

    @contextmanager
    def step(self) -> Iterator[None]:
        self._running = True
        yield
        self._running = False

    def phase(self, name: str) -> AbstractContextManager[None]:
        self.phases.append(name)
        return nullcontext()

    def on_operation(self, operation: Any, *_: Any) -> None:
        if self._running:
            self.inside += 1
        else:
            self.outside.append(str(operation))


def test_norms_of_a_frozen_backbone_are_no_measure_of_those_after_it_thaws() -> None:
    """The first norm of the whole model would be a spike beside those of the head, and so would every later one."""
    spikes = SpikeSpec(action="skip", factor=1.0001, window=10)
    cell = replace(CELL, optim=OptimSpec(lr=1e-12, freeze_backbone_steps=12, thaw_warmup_steps=1, spike=spikes))
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, 0)) as stream:
        session = build_session(cell, policy, stream.statistics)
        batch = next(iter(stream))
        results = [session.step(repeat(batch)) for _ in range(16)]
    norms = [float(result.grad_norm) for result in results]
    assert norms[12] > 1.0001 * norms[11]
    assert [result.skipped for result in results] == [False] * 16


def test_an_error_in_a_validation_of_averages_leaves_the_weights_that_are_stepped() -> None:
    cell = replace(CELL, optim=OptimSpec(lr=1e-3, warmup_steps=1, ema_decay=0.5))
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, 0)) as stream:
        session = build_session(cell, policy, stream.statistics)
        for _ in range(2):
            session.step(stream)
    trained = {name: tensor.clone() for name, tensor in session.backend.stepped_tensors().items()}

    def validate() -> None:
        assert any((tensor != trained[name]).any() for name, tensor in session.backend.stepped_tensors().items())
        raise DataError("damaged")

    with pytest.raises(DataError, match="damaged"), session.averaged_weights():
        validate()
    for name, tensor in session.backend.stepped_tensors().items():
        assert torch.equal(tensor, trained[name]), name


def test_no_tensor_operation_of_a_step_is_outside_what_is_timed() -> None:
    """Work between two steps would cost time on the device that is in no step, and throughput would be too high."""
    cell = replace(CELL, accumulation=2)
    policy = build_cell_policy(cell)
    watcher = StepWatcher()
    with closing(open_cell_data(cell, policy, 0)) as stream:
        session = build_session(cell, policy, stream.statistics)
        with OperationDispatchMode(watcher):
            result = session.step(stream, watcher)
    assert watcher.outside == []
    assert watcher.inside > 100
    assert set(result.parts) >= {"flow"}
    micro_step = ["data_wait", "forward", "backward"]
    assert watcher.phases == [*micro_step, *micro_step, "clip", "optimizer", "zero_grad", "sync"]
    assert result.samples == 4, "two micro-batches of two samples"
