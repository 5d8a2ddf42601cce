"""Costs of a step by phase and tower: a policy of two towers whose costs are known by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import graph_break_reasons
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from benchbox.measure.phases import CombinedInstrument, ProgressTracker
from benchbox.measure.step_costs import StepCosts, _allows_tf32
from benchbox.measure.step_trace import BETWEEN_OPERATIONS, NO_TOWER, STEP, TraceInstrument, read_trace
from benchbox.measure.towers import TowerTracker
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.registry.contracts import Role
from benchbox.store.rank_profile import UNKNOWN_TOWER

BATCH, WIDTH, TOKENS = 4, 32, 8
PRODUCT = 2 * BATCH * TOKENS * WIDTH * WIDTH  # of a linear layer
SCORES = 2 * BATCH * TOKENS * TOKENS * WIDTH  # of one of the two products of attention


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class TwoTowers(nn.Module):
    """`vision` is a module of its own; `expert` is called part by part, with attention between the parts."""

    def __init__(self, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.vision, self.expert = Tower(), Tower()
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointing else self.block(x)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        query = self.expert.inner(self.vision(x))
        attended = (query @ query.transpose(-1, -2)).softmax(-1) @ query
        return self.expert.outer(attended)

    def roles(self) -> dict[str, Role]:
        return {name: Role("head", decay=True, tower=name.split(".")[0]) for name, _ in self.named_parameters()}


def run_step(model: TwoTowers, instruments: CombinedInstrument | ProgressTracker) -> None:
    with instruments.step():
        with instruments.phase("forward"):
            output = model(torch.randn(BATCH, TOKENS, WIDTH))
        with instruments.phase("backward"):
            output.square().mean().backward()
        with instruments.phase("optimizer"), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)


def count(model: TwoTowers | None = None) -> StepCosts:
    model, tracker = model or TwoTowers(), ProgressTracker()
    towers = TowerTracker(model, model.roles())
    costs = StepCosts(lambda: tracker.state.phase, towers)
    with towers, OperationDispatchMode(costs):
        run_step(model, tracker)
    return costs


def flops_by(costs: StepCosts, *keys: str) -> dict[tuple[str | None, ...], int]:
    totals: dict[tuple[str | None, ...], int] = {}
    for product in costs.products():
        key = tuple(product[name] for name in keys)  # type: ignore[literal-required]
        totals[key] = totals.get(key, 0) + product["flops"]
    return totals


def test_flops_are_those_of_each_tower_in_forward_and_backward() -> None:
    """Attention between two layers of the expert is the expert's. The first layer's input needs no gradient."""
    assert flops_by(count(), "phase", "tower") == {
        ("forward", "vision"): 2 * PRODUCT,
        ("forward", "expert"): 2 * PRODUCT + 2 * SCORES,
        ("backward", "expert"): 4 * PRODUCT + 4 * SCORES,
        ("backward", "vision"): 3 * PRODUCT,
    }


def test_a_recomputed_forward_is_of_the_towers_that_are_recomputed() -> None:
    """A node of the expert asks for all of it. Its last layer is not run again: backward has what it needs before."""
    costs = count(TwoTowers(checkpointing=True))
    flops = flops_by(costs, "phase", "tower")
    assert flops["backward", "vision"] == 3 * PRODUCT + 2 * PRODUCT
    assert flops["backward", "expert"] == 4 * PRODUCT + 4 * SCORES + PRODUCT + 2 * SCORES
    assert costs.recomputed_flops == 3 * PRODUCT + 2 * SCORES


@pytest.mark.usefixtures("compiling")
def test_a_compiled_layer_of_one_tower_is_of_that_tower_and_one_of_several_is_of_an_unknown_one() -> None:
    """The first compilation traces the hooks that follow the towers: they must not become a part of the graph, or break it."""
    torch.compiler.reset()
    graph_break_reasons.clear()
    model = TwoTowers()
    model.vision.forward = torch.compile(model.vision.forward, backend="aot_eager")
    assert flops_by(count(model), "phase", "tower") == flops_by(count(), "phase", "tower")
    model = TwoTowers()
    model.block = torch.compile(model.block, backend="aot_eager")
    assert flops_by(count(model), "phase", "tower") == {
        ("forward", UNKNOWN_TOWER): 4 * PRODUCT + 2 * SCORES,
        ("backward", UNKNOWN_TOWER): 7 * PRODUCT + 4 * SCORES,
    }
    assert graph_break_reasons == []


def test_products_are_classified_by_dtype_and_shape() -> None:
    assert set(flops_by(count(), "dtype", "shape")) == {("float32", "thin"), ("float32", "batched")}


def test_bytes_of_an_operation_are_what_it_reads_and_writes() -> None:
    """Views and new memory are free, an expanded tensor is read once, and of an embedding only the rows that are taken."""
    tracker = ProgressTracker()
    costs = StepCosts(lambda: tracker.state.phase, TowerTracker(nn.Linear(1, 1), {}))
    x, table, target = torch.ones(1024), torch.ones(1000, 4), torch.zeros(1024)
    with OperationDispatchMode(costs), tracker.step():
        with tracker.phase("forward"):
            x.view(32, 32).t()[:3]
            torch.empty(10**6)
            x + x[:1].expand(1024)  # reads 4096 + 4 bytes, writes 4096
        with tracker.phase("backward"):
            F.embedding(torch.tensor([5, 6]), table)  # reads 16 bytes of indices and 32 of rows, writes 32
        with tracker.phase("optimizer"):
            target.copy_(x)  # reads the source only
            target.add_(x)  # reads both, writes the target
    counted = {phase: (sizes["read"], sizes["written"]) for phase, sizes in costs.bytes_by_phase().items()}
    assert counted == {"forward": (4100, 4096), "backward": (48, 32), "optimizer": (4096 + 8192, 8192)}


@pytest.mark.parametrize("is_scaled", [False, True])
def test_fused_adamw_moves_28_bytes_per_parameter_and_writes_gradients_only_to_undo_a_loss_scale(is_scaled: bool) -> None:
    """It reads the parameter, its gradient and both moments, and writes all but the gradient: 7 x 4 bytes."""
    parameters = [nn.Parameter(torch.ones(100, 10)), nn.Parameter(torch.ones(7))]
    optimizer: Any = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes the moments
    if is_scaled:
        optimizer.grad_scale = torch.full((), 2.0)
    costs = StepCosts(lambda: "optimizer", TowerTracker(nn.Linear(1, 1), {}))
    with OperationDispatchMode(costs):
        optimizer.step()
    assert torch.equal(parameters[0].grad, torch.full((100, 10), 0.5 if is_scaled else 1.0))
    counters = 2 * 4  # bytes of the numbers of steps: read and written to count on, and read for the bias correction
    sizes = costs.bytes_by_phase()["optimizer"]
    assert sizes["read"] == 4 * 4 * 1007 + 2 * counters + (4 if is_scaled else 0)  # the scale is read as well
    assert sizes["written"] == (4 if is_scaled else 3) * 4 * 1007 + counters


def test_a_compiled_pass_that_is_no_operation_is_counted_by_its_tensors() -> None:
    costs = StepCosts(lambda: "optimizer", TowerTracker(nn.Linear(1, 1), {}))
    master, gradient = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    costs.on_pass([master, gradient], [master])
    assert costs.bytes_by_phase()["optimizer"] == {"read": 256 + 128, "written": 256, "collectives": 0}


def test_times_of_a_trace_add_up_to_its_steps_and_towers_have_theirs() -> None:
    model = TwoTowers()
    tracker, towers = ProgressTracker(), TowerTracker(model, model.roles(), annotate=True)
    with profile(activities=None) as profiler, towers:
        for _ in range(2):
            run_step(model, CombinedInstrument(tracker, TraceInstrument()))
    events = profiler.events()
    times = read_trace(events, towers, on_host=True)
    total = sum(sum(by_tower.values()) for by_tower in times.tower_s.values())
    steps_us = [event.time_range.elapsed_us() for event in events if event.name == STEP]
    assert len(steps_us) == 2
    assert total == pytest.approx(sum(steps_us) / 1e6, rel=1e-3)
    assert times.collective_s is None
    assert sum(operator["self_s"] for operator in times.operators) == pytest.approx(total)
    for phase in ("forward", "backward"):
        assert {"vision", "expert"} <= times.tower_s[phase].keys()
    assert times.tower_s["optimizer"].keys() == {NO_TOWER}
    names = {operator["name"]: operator for operator in times.operators}
    assert names["aten::addmm"]["calls"] == 2 * 4
    assert BETWEEN_OPERATIONS in names


def test_tf32_of_convolutions_is_their_own_setting_however_a_program_has_set_it() -> None:
    """cuDNN uses TF32 unless told otherwise, products do not. Torch refuses to read what a newer setting has made."""
    assert [_allows_tf32(name) for name in ("convolution", "convolution_backward", "mm")] == [True, True, False]
    matmul, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolutions.fp32_precision
    try:
        matmul.fp32_precision, convolutions.fp32_precision = "tf32", "ieee"
        with pytest.raises(RuntimeError):
            assert torch.backends.cudnn.allow_tf32
        assert [_allows_tf32(name) for name in ("convolution", "mm")] == [False, True]
    finally:
        matmul.fp32_precision, convolutions.fp32_precision = before
