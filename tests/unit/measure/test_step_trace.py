"""Times of a trace on a GPU, from made-up events: operations run on the host, and their kernels later."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.autograd.profiler_util import FunctionEvent

from benchbox.measure.step_trace import NO_TOWER, read_trace
from benchbox.measure.towers import TowerTracker


def event(name: str, start_us: int, end_us: int, thread: int = 1, kernels: dict[str, int] | None = None) -> Any:
    """Return an operation on the host; `kernels` are the microseconds of those that it launched."""
    made: Any = FunctionEvent(0, name, thread, start_us, end_us, use_device="cuda")
    for kernel, duration_us in (kernels or {}).items():
        made.append_kernel(kernel, 0, duration_us)
    return made


def inside(parent: Any, *children: Any) -> Any:
    for child in children:
        child.cpu_parent = parent
        parent.cpu_children.append(child)
    return parent


@pytest.fixture
def events() -> list[Any]:
    """A step that the host leaves after 60 ms, while its kernels run for 240 ms, 90 of them beside others in a collective."""
    product = event("aten::mm", 1_000, 2_000, kernels={"sm90_gemm": 100_000})
    tower = inside(event("tower:vision", 1_000, 3_000), product)
    forward = inside(event("phase:forward", 0, 20_000), tower)
    backward = event("phase:backward", 20_000, 50_000)
    gradient = event("aten::mm", 22_000, 23_000, thread=2, kernels={"sm90_gemm": 150_000})
    reduced = event(
        "c10d::allreduce_", 24_000, 25_000, thread=2, kernels={"ncclDevKernel_AllReduce_Sum_bf16": 90_000, "cast": 5}
    )
    step = inside(event("step", 0, 60_000), forward, backward)
    return [step, forward, tower, product, backward, gradient, reduced]


def test_kernels_are_of_the_phase_and_tower_whose_operation_launched_them(events: list[Any]) -> None:
    times = read_trace(events, TowerTracker(nn.Linear(1, 1), {}), on_host=False)
    assert times.tower_s["forward"] == {"vision": pytest.approx(0.1)}
    assert times.operators[0] == {"name": "aten::mm", "calls": 2, "self_s": pytest.approx(0.25)}


def test_collectives_have_a_time_of_their_own_and_are_in_that_of_no_tower(events: list[Any]) -> None:
    """They run beside other kernels, and wait for other ranks: towers would be too small a part of their phase."""
    times = read_trace(events, TowerTracker(nn.Linear(1, 1), {}), on_host=False)
    assert times.collective_s == pytest.approx(0.09)
    assert times.tower_s["backward"] == {NO_TOWER: pytest.approx(0.150005)}
    assert {operator["name"]: operator["self_s"] for operator in times.operators}["c10d::allreduce_"] == pytest.approx(0.090005)
