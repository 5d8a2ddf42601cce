"""`benchbox.audit_precision` and `benchbox.observe` in a training loop of one's own."""

from __future__ import annotations

import pytest
import torch

import benchbox
from benchbox.errors import ConfigurationError, ThresholdError


def training(dtype, lr=1e-5):
    """Return a model, its optimizer and a function that takes one step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    inputs = torch.randn(4, 8, dtype=dtype)

    def step():
        model(inputs).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def test_adam_on_bfloat16_weights_is_found_with_the_repair():
    result = benchbox.audit_precision(*training(torch.bfloat16))
    assert not result.passed
    assert "BXP101" in {finding.code for finding in result.findings}
    assert result.numbers["edq"] < 0.5
    with pytest.raises(ThresholdError, match=r"BXP101 .*: "):
        result.check()


def test_float32_weights_pass_and_the_steps_train():
    model, optimizer, step = training(torch.float32)
    before = model[0].weight.clone()
    result = benchbox.audit_precision(model, optimizer, step)
    assert result.passed
    assert result.numbers["edq"] == pytest.approx(1.0, abs=1e-3)
    result.check()
    assert not torch.equal(model[0].weight, before)
    assert optimizer.state[model[0].weight]["step"].item() == 3


def test_the_audited_steps_are_bit_for_bit_those_of_the_loop_alone():
    model, optimizer, step = training(torch.float32, lr=1e-2)
    benchbox.audit_precision(model, optimizer, step)
    alone, _, step = training(torch.float32, lr=1e-2)
    for _ in range(3):
        step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


def test_a_declared_recipe_makes_a_deviation_a_finding():
    """The float32 training above is clean, and is not what bf16_master computes in."""
    result = benchbox.audit_precision(*training(torch.float32), recipe="bf16_master")
    assert any("bf16_master" in str(finding.evidence) + finding.title + finding.where for finding in result.findings)


def test_an_unknown_recipe_is_refused_before_any_step():
    with pytest.raises(ConfigurationError, match="bf16_masters"):
        benchbox.audit_precision(*training(torch.float32), recipe="bf16_masters")


def test_an_observer_removes_itself_after_its_steps():
    model, optimizer, step = training(torch.float32)
    with benchbox.observe(model, optimizer, steps=2) as observer:
        for _ in range(5):
            step()
    assert observer.steps_observed == 2
    assert {tensor.name for tensor in observer.facts().stepped} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_an_audit_whose_observer_failed_does_not_pass(monkeypatch):
    """The rules say nothing about what it missed."""
    monkeypatch.setattr("benchbox.observer.numerics.probes.TensorProbe.before_step", lambda *_: 1 / 0)
    result = benchbox.audit_precision(*training(torch.float32))
    assert not result.passed
    with pytest.raises(ThresholdError, match=r"the observer failed on rank 0: .*ZeroDivisionError"):
        result.check()
