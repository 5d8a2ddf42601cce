"""Master weights on the device are those of float32 training."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchbox.optim import MasterWeightOptimizer, one_pass, passes
from tests.support.masters import ADAMW, all_equal, master_optimizer, model, set_gradients, upcast_gradients

if TYPE_CHECKING:
    from collections.abc import Iterable

STEPS = 20
# The Triton kernel rounds a weight as often as torch's kernel does, but from other digits: one unit in the last place a step at
# most. The first bound, 1e-6, was a guess, and 1.3e-6 was measured on an H200.
ROUNDING = {"triton": {"rtol": STEPS * 2**-23, "atol": 1e-9}, "torch": {"rtol": 0.0, "atol": 0.0}}


@pytest.fixture(params=["torch", "triton"])
def rounding(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The largest difference from float32 training, once for each way to step masters on the device."""
    if request.param == "torch":
        monkeypatch.setattr(one_pass, "_has_triton", lambda: False)
    elif device.type != "cuda" or find_spec("triton") is None:
        pytest.skip("needs an NVIDIA GPU and Triton")
    return ROUNDING[request.param]


def assert_equal(tensors: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], rounding: dict[str, float]) -> None:
    for tensor, other in zip(tensors, wanted, strict=True):
        torch.testing.assert_close(tensor.detach(), other.detach(), **rounding)


def gradients_on(device: torch.device, live: nn.Module, step: int) -> None:
    """Set the gradients of `set_gradients`, which are drawn on the CPU."""
    drawn = model().to(torch.bfloat16)
    set_gradients(drawn, step)
    for parameter, source in zip(live.parameters(), drawn.parameters(), strict=True):
        parameter.grad = source.grad.to(device)


def test_masters_step_as_float32_weights_would(device: torch.device, rounding: dict[str, float]) -> None:
    """Given the same gradients, masters follow AdamW on float32 weights, and live weights are them, rounded."""
    full, live = model().to(device), model().to(device, torch.bfloat16)
    optimizer = master_optimizer(live, list(model().to(device).parameters()))
    reference = torch.optim.AdamW(full.parameters(), **ADAMW)
    for step in range(STEPS):
        gradients_on(device, live, step)
        upcast_gradients(full, live)
        optimizer.step()
        reference.step()
    assert {master.device.type for master in optimizer.masters} == {device.type}
    assert_equal(optimizer.masters, full.parameters(), rounding)
    assert all_equal(live.parameters(), [master.to(torch.bfloat16) for master in optimizer.masters])


def test_a_weight_larger_than_a_bucket_steps_as_a_whole_would(device: torch.device, rounding: dict[str, float]) -> None:
    """5e6 elements: more than the optimizer upcasts at once on any device."""
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = (torch.randn(5_000_003, generator=generator) for _ in range(4))
    full, live = nn.Parameter(weight.to(device)), nn.Parameter(weight.to(device, torch.bfloat16))
    optimizer = MasterWeightOptimizer([live], torch.optim.AdamW, masters=[weight.clone().to(device)], **ADAMW)
    reference = torch.optim.AdamW([full], **ADAMW)
    for gradient in gradients:
        live.grad = gradient.to(device, torch.bfloat16)
        full.grad = live.grad.float()
        optimizer.step()
        reference.step()
    assert_equal(optimizer.masters, [full], rounding)
    assert torch.equal(live, optimizer.masters[0].to(torch.bfloat16))


def test_clipping_scales_the_upcast_gradients_once(device: torch.device) -> None:
    full, live = model().to(device), model().to(device, torch.bfloat16)
    optimizer = master_optimizer(live, list(model().to(device).parameters()))
    reference = torch.optim.AdamW(full.parameters(), **ADAMW)
    for step in range(STEPS):
        gradients_on(device, live, step)
        upcast_gradients(full, live)
        before = [parameter.grad.clone() for parameter in live.parameters()]
        norm = optimizer.clip_grad_norm_(0.5)
        expected_norm = nn.utils.clip_grad_norm_(full.parameters(), 0.5)
        assert float(norm) == pytest.approx(float(expected_norm), rel=1e-6)
        assert all_equal(before, [parameter.grad for parameter in live.parameters()]), "live gradients are not scaled"
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for master, wanted in zip(optimizer.masters, full.parameters(), strict=True):
        torch.testing.assert_close(master, wanted, rtol=1e-5, atol=1e-7)


def test_the_step_reads_nothing_from_the_device(cuda: torch.device) -> None:
    """Reading a value would make the host wait in every step."""
    live = model().to(cuda, torch.bfloat16)
    optimizer = master_optimizer(live, list(model().to(cuda).parameters()))
    for step in range(2):
        gradients_on(cuda, live, step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step creates the state
        try:
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_listener_receives_the_tensors_of_a_step(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is no operation of torch, and `benchbox profile` would count no bytes for it."""
    assert one_pass._has_triton(), "torch for CUDA comes with Triton, and it can start kernels"
    live = model().to(cuda, torch.bfloat16)
    optimizer = master_optimizer(live, list(model().to(cuda).parameters()))
    heard = []
    for step in range(2):  # the first creates the state
        gradients_on(cuda, live, step)
        monkeypatch.setattr(passes, "pass_listeners", [lambda read, written: heard.append((read, written))])
        optimizer.step()
    elements = sum(parameter.numel() for parameter in live.parameters())
    ((read, written),) = heard
    assert sum(tensor.nbytes for tensor in read) == sum(tensor.nbytes for tensor in written) == 14 * elements


def test_a_trace_has_the_device_time_of_a_step(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation of torch starts the kernel, and `benchbox profile` would count no time for it."""
    assert one_pass._has_triton(), "torch for CUDA comes with Triton, and it can start kernels"
    live = model().to(cuda, torch.bfloat16)
    optimizer = master_optimizer(live, list(model().to(cuda).parameters()))
    monkeypatch.setattr(passes, "pass_listeners", [lambda read, written: None])
    for step in range(3):  # the first creates the state, the second compiles
        gradients_on(cuda, live, step)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            optimizer.step()
            torch.cuda.synchronize()
    (event,) = (event for event in profiler.events() if event.name == "benchbox::adamw")
    assert event.self_device_time_total > 0
