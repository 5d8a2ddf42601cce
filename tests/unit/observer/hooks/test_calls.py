"""Clipping, scaled losses and loading of optimizer state, recorded by patched functions."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from benchbox.audit.judge import judge
from benchbox.observer.facts import Scaler
from benchbox.observer.observer import StepObserver
from tests.support.observed_trainings import layers, train


def test_micro_batches_clipping_and_the_dtype_that_accumulates_are_seen():
    model = layers(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with StepObserver(source="command", steps=4) as observer:
        for _ in range(4):
            for _ in range(3):
                model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    facts = observer.facts()
    assert [step.micro_batches for step in facts.steps if step.micro_batches] == [3, 3, 3]
    assert facts.accumulated_in == ("bfloat16",)
    assert facts.steps[-1].max_norm == 0.5
    assert facts.steps[-1].reported_norm > 1.0
    assert facts.steps[-1].stepped_norm == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_of_a_gradient_scaler_and_those_that_it_skips_are_counted(fused):
    """A fused optimizer is called all the same, and skips the step itself."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with StepObserver(source="command", steps=4) as observer:
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 8)).sum()).backward()
            if step == 1:
                model[0].bias.grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
    assert observer.facts().scaler == Scaler(name="GradScaler", steps=4, skipped=1)


@pytest.mark.parametrize("collect", [iter, set])
def test_losses_that_have_no_first_one_reach_the_backward_pass(collect):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with StepObserver(source="command", steps=1) as observer:
        torch.autograd.backward(collect([model(torch.ones(2, 8)).sum()]))
        optimizer.step()
    assert observer.facts().problems == ()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("scale", [None, 1.0, 1024.0])
def test_a_scale_that_the_script_passes_to_the_backward_pass_is_seen(scale):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with StepObserver(source="command", steps=1) as observer:
        model(torch.ones(2, 8)).sum().backward(None if scale is None else torch.tensor(scale))
        optimizer.step()
    assert observer.facts().problems == ()
    assert (observer.facts().scaler is not None) == (scale == 1024.0)


def scaled_and_halved(losses):
    return (losses.mean() * torch.tensor(1024.0)).double() / 2


@pytest.mark.parametrize(
    ("scaled", "reported"),
    [
        (lambda losses: losses.mean(), {"BXP305"}),
        (lambda losses: losses.sum(), {"BXP305"}),
        (lambda losses: 2.5 * losses.mean() / 4, {"BXP305"}),
        (lambda losses: (2.5 * losses).mean(), {"BXP305"}),
        (lambda losses: 512 * losses.mean(), set()),
        (lambda losses: (512 * losses).mean(), set()),
        (lambda losses: (512 * losses).sum() / len(losses), set()),
        (scaled_and_halved, set()),
        (lambda losses: (512 * losses.view(4, -1)).view(-1).mean(), set()),
        (lambda losses: (512 * losses.mean()).reshape(1).squeeze(0).unsqueeze(0), set()),
        (lambda losses: (2.5 * losses.mean()).reshape(1).squeeze(0).unsqueeze(0), {"BXP305"}),
    ],
)
def test_a_loss_that_the_script_multiplies_by_hand_is_scaled(scaled, reported):
    model = layers(torch.float16)
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    with StepObserver(source="command", steps=3) as observer:
        for _ in range(3):
            scaled(model(torch.ones(20, 8, dtype=torch.float16)).float().square().mean(dim=1)).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.data.copy_(master)
    assert {finding.code for finding in judge([observer.facts()]).findings} & {"BXP305"} == reported


def test_a_single_micro_batch_that_adds_to_gradients_of_zero_accumulates_nothing():
    model = layers(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with StepObserver(source="command", steps=4) as observer:
        for _ in range(4):
            model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert observer.facts().accumulated_in == ()


def test_loading_moments_into_16_bit_parameters_is_seen_to_cast_them():
    model = layers(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    with StepObserver(source="command", steps=2) as observer:
        train(model, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            state["exp_avg"] = state["exp_avg"].float()
        optimizer.load_state_dict(saved)
        train(model, optimizer, 1)
    (load,) = observer.facts().loads
    assert (load.given["exp_avg"], load.held["exp_avg"]) == (("float32",), ("bfloat16",))


def test_forward_passes_of_an_evaluation_are_no_micro_batches():
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with StepObserver(source="command", steps=4) as observer:
        for _ in range(4):
            with torch.no_grad():
                for _ in range(2):
                    model(torch.ones(2, 8))
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.micro_batches for step in observer.facts().steps if step.micro_batches is not None] == [1, 1, 1]


def test_clipping_by_the_largest_element_is_not_compared_with_the_norm_of_the_gradients():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with StepObserver(source="command", steps=4) as observer:
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=math.inf)
            optimizer.step()
            optimizer.zero_grad()
    facts = observer.facts()
    assert facts.missing["clip"] == "no clipping was seen"
    assert "BXP304" not in {finding.code for finding in judge([facts]).findings}


@pytest.mark.parametrize("passes", [1, 2], ids=["one backward pass", "one for each"])
def test_forward_passes_are_micro_batches_only_with_a_backward_pass_of_their_own(passes):
    """A network that compares two inputs runs forward twice; gradients of the step before are no accumulated ones."""
    model = layers(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = [torch.ones(2, 8, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.bfloat16)]
    with StepObserver(source="command", steps=4) as observer:
        for _ in range(4):
            if passes == 1:
                first, second = (model(part) for part in inputs)
                optimizer.zero_grad()
                (first - second).square().sum().backward()
            else:
                optimizer.zero_grad()
                for part in inputs:
                    model(part).sum().backward()
            optimizer.step()
    facts = observer.facts()
    assert [step.micro_batches for step in facts.steps if step.micro_batches is not None] == [passes] * 3
    assert ("BXP301" in {finding.code for finding in judge([facts]).findings}) == (passes == 2)


@pytest.mark.skipif(not hasattr(torch.nn.utils, "get_total_norm"), reason="since torch 2.6")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_by_a_norm_that_was_computed_before_is_seen_if_it_is_that_of_squares(norm_type):
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with StepObserver(source="command", steps=3) as observer:
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()], norm_type)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
            optimizer.step()
            optimizer.zero_grad()
    facts = observer.facts()
    if norm_type == 2.0:
        assert {step.max_norm for step in facts.steps} == {0.01}
        assert all(step.reported_norm > 0.1 > step.stepped_norm for step in facts.steps)
        assert "BXP304" in judge([facts]).clean
    else:
        assert facts.missing["clip"] == "no clipping was seen"


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_gradients_that_fsdps_scaler_unscales_after_their_clipping_are_found():
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    original = ShardedGradScaler.unscale_
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    with StepObserver(source="command", steps=3) as observer:
        for _ in range(3):
            scaler.scale(model(torch.ones(2, 8)).sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.unscale_(optimizer)
            optimizer.step()
            scaler.update()
            optimizer.zero_grad()
    assert {step.clip_scale for step in observer.facts().steps} >= {1024.0}
    assert ShardedGradScaler.unscale_ is original
