"""Speed of master weights on the device, relative to a copy and to torch's own kernels."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchbox.optim import MasterWeightOptimizer, one_pass

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

SHAPES = [(4096, 4096)] * 32  # 537 M parameters: 15 GB of traffic in a step
BYTES_A_PARAMETER = 28  # read: gradient 2, master, moments 12; written: master, moments 12, live weight 2
OF_COPY, OVER_FOREACH = 0.85, 2.0
ROUNDS = 20
LEAD_CYCLES = 40_000_000  # about 20 ms


def seconds(work: Callable[[], object]) -> float:
    """Return the median time of the device for `work`, which the host submits while the device is busy, as after a backward."""
    work()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(LEAD_CYCLES)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return median(times)


def optimizer(device: torch.device, **arguments: object) -> MasterWeightOptimizer:
    parameters = [nn.Parameter(torch.randn(shape, device=device).mul_(0.02).bfloat16()) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    built = MasterWeightOptimizer(parameters, torch.optim.AdamW, lr=1e-4, weight_decay=0.1, **arguments)
    built.step()  # creates the state
    return built


def copy_bandwidth(elements: int, device: torch.device) -> float:
    """Return the bytes per second that a copy of so many float32 elements reads and writes."""
    source, target = (torch.empty(elements, device=device) for _ in range(2))
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def test_a_step_moves_bytes_nearly_as_fast_as_a_copy_and_twice_as_fast_as_foreach(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert one_pass._has_triton(), "torch for CUDA comes with Triton, and it can start kernels"
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    copied = copy_bandwidth(elements, cuda)
    ours = optimizer(cuda, fused=True)
    step_s = seconds(ours.step)
    del ours
    monkeypatch.setattr(one_pass, "_has_triton", lambda: False)
    foreach_s = seconds(optimizer(cuda, foreach=True).step)
    moved = BYTES_A_PARAMETER * elements / step_s
    with capsys.disabled():
        print(f"\nmasters: {moved / 1e12:.2f} TB/s, {moved / copied:.2f} of a copy; foreach {foreach_s / step_s:.2f} as long")
    assert moved >= OF_COPY * copied
    assert foreach_s >= OVER_FOREACH * step_s
