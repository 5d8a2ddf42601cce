"""Estimates of cells."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch.distributed as dist

from benchbox.errors import UnsupportedError
from benchbox.estimation import Estimator
from benchbox.spec.cell import DataSpec, OptimSpec
from tests.support.ranks import tiny_cell


@pytest.fixture(scope="module")
def estimator():
    return Estimator()


def test_one_trace_serves_all_backends_ranks_and_micro_steps(estimator):
    cells = [
        tiny_cell(backend=backend, world_size=ranks, accumulation=accumulation)
        for backend, ranks, accumulation in (("ddp", 8, 1), ("fsdp2", 1024, 1), ("zero3", 64, 2), ("hsdp", 8, 3))
    ]
    estimates = [estimator.estimate(cell) for cell in cells]
    assert len(estimator._traces) == 1
    assert len({estimate.peak_bytes for estimate in estimates}) == len(cells)
    assert sum(estimates[0].components.values()) == estimates[0].peak_bytes
    assert not dist.is_initialized()


def test_a_policys_own_collective_is_counted_where_there_are_ranks_to_agree(estimator):
    """The vote on the optional parts of a batch, the mean loss, and the gradient norm; gradients are reduced otherwise."""
    assert estimator.estimate(tiny_cell(backend="fsdp2", world_size=8)).collectives["all_reduce"]["count"] == 3


def test_averages_and_the_spike_guard_cost_what_they_keep_and_send(estimator):
    plain = tiny_cell(backend="fsdp2", world_size=8)
    averaged = replace(plain, optim=replace(plain.optim, ema_decay=0.99))
    difference = estimator.estimate(averaged).resident_bytes - estimator.estimate(plain).resident_bytes
    assert difference == estimator.estimate(plain).components["parameters"]


def test_a_dataset_that_is_elsewhere_is_estimated_on_generated_samples_and_said_so(estimator):
    cell = tiny_cell(data=DataSpec(kind="lerobot", path="/nowhere/to/be/found", workers=0))
    (note,) = estimator.estimate(cell).notes
    assert note.startswith("with generated samples")


def test_there_is_no_prediction_for_a_backend_without_a_formula(estimator):
    with pytest.raises(UnsupportedError, match="no formula for the memory of backend somebodys"):
        estimator.estimate(tiny_cell(backend="somebodys"))


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpointing": True, "attention": "sdpa"},
        {"policy": "pi07_low_level", "cams": 4, "recipe": "fp32_autocast"},
        {"policy": "vitra", "freeze": "freeze_vision", "backend": "fsdp1_full"},
        {"policy": "value", "recipe": "fp32", "backend": "zero3"},
    ],
    ids=lambda changes: changes.get("policy", "pi05"),
)
def test_a_small_policy_is_traced_on_real_tensors_with_the_same_result(monkeypatch, changes):
    """Memory by component, communication and FLOPs are those of a trace on fake tensors."""
    module = sys.modules[Estimator.__module__]
    traced = []
    through = module.make_fake
    monkeypatch.setattr(module, "make_fake", lambda *arguments: (traced.append("fake"), through(*arguments)))
    cell = tiny_cell(**({"backend": "fsdp2", "world_size": 2} | changes))
    real = Estimator().estimate(cell)
    assert traced == []
    monkeypatch.setattr(module, "MAX_REAL_WORK", real.total_numel * cell.batch - 1)
    assert Estimator().estimate(cell) == real
    assert traced == ["fake"]


def test_recipes_store_what_they_say(estimator):
    """Per parameter under ZeRO-1 with one copy of everything on two ranks: what the rank keeps between steps."""
    numel = estimator.estimate(tiny_cell()).total_numel
    sizes = {"fp32": 4 + 12 / 2, "bf16_master": 2 + 12 / 2, "bf16_pure": 2 + 6 / 2}
    for recipe, size in sizes.items():
        estimate = estimator.estimate(tiny_cell(backend="zero1", recipe=recipe, optim=OptimSpec()))
        assert estimate.resident_bytes == pytest.approx(numel * size, rel=1e-3), recipe
