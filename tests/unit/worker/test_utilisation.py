"""Utilisation of a training's steps, from the formulas of the policy."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.measure.flops import DEVICE_PEAKS
from benchbox.measure.phases import ProgressTracker
from benchbox.spec.cell import OptimSpec
from benchbox.store.events import EventWriter
from benchbox.theory.flops import Product
from benchbox.worker import training
from benchbox.worker.utilisation import StepUtilisation
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchbox.spec.cell import Cell

CPU = torch.device("cpu")


class Formula:
    """Policy with one product of 1e9 FLOPs for each sample, and gradients of both factors."""

    def work(self, batch: dict[str, torch.Tensor]) -> list[Product]:
        return [Product(tower="backbone", flops=10**9 * len(batch["state"]), gradients=2)]


def batches() -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield {"state": torch.zeros(4, 2)}


def step_utilisation(policy: Any = None, compute: str = "bfloat16") -> StepUtilisation:
    return StepUtilisation(policy or Formula(), CPU, accumulation=2, compute=compute)


def trained(cell: Cell, folder: Path, steps: int) -> list[dict[str, Any]]:
    """Train a cell and return the rows of its metrics, one for each step."""
    config = {"name": "t", "cell": cell.to_dict(), "steps": steps, "log_every": 1, "hang_after_s": 60.0}
    job: Any = {"train": config, "folder": str(folder), "checkpoint": None, "policy_dirs": []}
    signals: Any = SimpleNamespace(requested=None, defer=lambda: None)
    training.train(job, 0, ProgressTracker(), EventWriter(folder / "events", 0), signals)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_is_the_flops_of_the_micro_batches_of_a_step_over_time_and_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up peak: none is known for a CPU. Two micro-batches of 4 samples, forward and two gradients: 24e9 FLOPs."""
    monkeypatch.setitem(DEVICE_PEAKS, "this cpu", 1e12)
    steps = step_utilisation()
    stream = steps.record(batches())
    for _ in range(6):
        assert next(stream)["state"].shape == (4, 2)
    assert steps.mfu(0.1) == (pytest.approx(0.24), None)
    assert steps.mfu(0.2) == (pytest.approx(0.12), None)


def test_batches_are_released_once_their_flops_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they would take memory for the rest of the training, which no benchmark of it needs."""
    monkeypatch.setitem(DEVICE_PEAKS, "this cpu", 1e12)
    kept: list[weakref.ref[torch.Tensor]] = []

    def watched() -> Iterator[dict[str, torch.Tensor]]:
        for batch in batches():
            kept.append(weakref.ref(batch["state"]))
            yield batch
            del batch

    steps = step_utilisation()
    stream = steps.record(watched())
    for _ in range(2):
        next(stream)
    steps.mfu(0.1)
    for _ in range(4):
        next(stream)
    gc.collect()
    assert sum(reference() is not None for reference in kept) <= 1, "the latest, which the iterator holds"


def test_it_is_unknown_while_steps_leave_out_work_that_the_formula_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backbone is frozen first, and thaws."""
    monkeypatch.setitem(DEVICE_PEAKS, "this cpu", 1e12)
    frozen = [True]
    steps = StepUtilisation(Formula(), CPU, accumulation=2, compute="bfloat16", is_partial=lambda: frozen[0])
    stream = steps.record(batches())
    for _ in range(2):
        next(stream)
    assert steps.mfu(0.1) == (None, "the backbone is frozen now, and the formula counts its gradients")
    frozen[0] = False
    assert steps.mfu(0.1) == (pytest.approx(0.24), None)


def test_it_is_unknown_where_batches_differ_in_shape_and_none_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICE_PEAKS, "this cpu", 1e12)
    steps = StepUtilisation(Formula(), CPU, accumulation=1, compute="bfloat16", shapes_vary=True)
    stream = batches()
    assert steps.record(stream) is stream
    assert steps.mfu(0.1) == (None, "batches differ in shape from step to step (padding: longest)")


def test_a_training_without_common_padding_says_why_it_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICE_PEAKS, "this cpu", 1e12)
    cell = tiny_cell(backend="single", world_size=1, batch=1, padding="longest")
    (row,) = trained(cell, tmp_path, steps=1)
    assert row["mfu"] is None
    assert row["mfu_reason"] == "batches differ in shape from step to step (padding: longest)"


def test_a_training_knows_it_from_the_step_on_in_which_its_backbone_thaws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICE_PEAKS, "this cpu", 1e12)
    cell = tiny_cell(backend="single", world_size=1, batch=1, optim=OptimSpec(freeze_backbone_steps=1))
    frozen, thawed = trained(cell, tmp_path, steps=2)
    assert frozen["mfu"] is None
    assert frozen["mfu_reason"].startswith("the backbone is frozen now")
    assert 0 < thawed["mfu"] < 1


def test_it_is_unknown_for_a_reason_and_batches_pass_unrecorded() -> None:
    stream = batches()
    steps = step_utilisation()
    assert steps.record(stream) is stream
    assert steps.mfu(0.1) == (None, "no peak is known for this cpu")
    frozen = StepUtilisation(Formula(), CPU, accumulation=1, compute="bfloat16", is_partial=lambda: True)
    assert frozen.mfu(0.1) == (None, "no peak is known for this cpu"), "which no thaw will change"
    assert StepUtilisation(None, CPU, accumulation=1, compute="bfloat16").mfu(0.1) == (
        None,
        "the policy declares no formula of its FLOPs",
    )


def test_a_peak_of_16_bit_products_says_nothing_about_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICE_PEAKS, "this cpu", 1e12)
    mfu, reason = step_utilisation(compute="float32").mfu(0.1)
    assert mfu is None
    assert reason is not None
    assert "float32" in reason
