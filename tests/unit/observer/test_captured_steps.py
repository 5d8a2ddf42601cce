"""Steps that a CUDA graph captures. No graph exists without a GPU: here torch only says so, and reading numbers fails as there.

`tests/gpu/test_captured_steps.py` captures a real one.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from benchbox.audit.judge import judge
from benchbox.observer.observer import StepObserver
from tests.support.observed_trainings import layers

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "equal")


@contextmanager
def capture(monkeypatch):
    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for name in READS:
            patched.setattr(torch.Tensor, name, refuse)
        patched.setattr(torch, "equal", refuse)
        yield


def step(model, optimizer, capture_now=None):
    torch.manual_seed(0)
    batch = torch.randn(4, 8)
    if capture_now is None:
        _step(model, optimizer, batch)
    else:
        with capture(capture_now):
            _step(model, optimizer, batch)


def _step(model, optimizer, batch):
    # foreach: the loop over single tensors reads the step count of each on a CPU, which capturable kernels do not
    (1024.0 * model(batch).square().mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()


def training():
    torch.manual_seed(0)
    model = layers()
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)


@pytest.mark.parametrize("captured", [1, 2, 3, 5, 6])
def test_a_captured_step_is_as_without_the_observer_and_others_are_observed(monkeypatch, captured) -> None:
    """Whichever it is: the first, the middle, the recorded and the last step are those in which numbers are read."""
    alone, watched = training(), training()
    with StepObserver(source="command", steps=6) as observer:
        for number in range(1, 9):
            step(*watched, monkeypatch if number == captured else None)
    for number in range(1, 9):
        step(*alone, monkeypatch if number == captured else None)
    assert all(map(torch.equal, watched[0].parameters(), alone[0].parameters()))
    facts = observer.facts()
    assert facts.problems == ()
    assert [observed.step for observed in facts.steps] == [1, 2, 3, 4, 5, 6]
    assert {tensor.numbers.steps for tensor in facts.stepped} == {3}
    assert facts.opaque == ()


def test_an_optimizer_that_steps_only_in_a_graph_is_unknown(monkeypatch) -> None:
    model, optimizer = training()
    with StepObserver(source="command", steps=6) as observer:
        step(model, optimizer, monkeypatch)
    facts = observer.facts()
    assert facts.missing["stepped"] == "the step is captured in a CUDA graph: not observed"
    assert judge([facts]).findings == ()


def test_an_optimizer_whose_attributes_raise_is_captured_as_without_the_observer(monkeypatch) -> None:
    class Guarding(torch.optim.SGD):
        @property
        def inner(self):
            raise RuntimeError("not before the warm-up")

    model, _ = training()
    optimizer = Guarding(model.parameters(), lr=1e-2, foreach=True)
    before = [parameter.clone() for parameter in model.parameters()]
    with StepObserver(source="command", steps=6) as observer:
        step(model, optimizer, monkeypatch)
    assert not any(map(torch.equal, before, model.parameters()))
    assert len(observer.facts().problems) == 1


def test_of_two_optimizers_the_one_that_steps_only_in_a_graph_is_opaque(monkeypatch) -> None:
    observed, captured = training(), training()
    with StepObserver(source="command", steps=6) as observer:
        for _ in range(3):
            step(*observed)
            step(*captured, monkeypatch)
    (opaque,) = observer.facts().opaque
    assert opaque.reason == "the step is captured in a CUDA graph: not observed"
