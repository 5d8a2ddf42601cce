"""The check of a training without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchbox.optim import GroupPlan
from benchbox.session.build import build_cell_policy
from benchbox.trainer.preview import _preview_group, _read_datasets
from tests.support.ranks import tiny_cell


def test_a_preview_puts_its_sample_on_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that runs may have taken all memory of the GPU, also what a second CUDA context needs."""
    cell = tiny_cell(backend="single", world_size=1)
    policy = build_cell_policy(cell)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _read_datasets(cell, policy) == ((), ()), "samples are generated"


@pytest.mark.parametrize(
    ("backend", "recipe", "sizes"),
    [
        ("ddp", "fp32", (4, 0, 8)),
        ("ddp", "bf16_master", (2, 4, 8)),
        ("ddp", "bf16_pure", (2, 0, 4)),
        ("ddp", "bf16_kahan", (2, 0, 6)),  # and what rounding lost
        ("ddp", "bf16_naive", (2, 0, 4)),
        ("fsdp2", "bf16_naive", (2, 4, 8)),
    ],
)
def test_weights_masters_and_moments_take_what_recipe_and_backend_keep(
    backend: str, recipe: str, sizes: tuple[int, int, int]
) -> None:
    config: Any = SimpleNamespace(cell=tiny_cell(backend=backend, recipe=recipe), steps=1)
    plan = GroupPlan("head", ("weight",), 1e-3, 0.0, (0.9, 0.95), "head")
    group = _preview_group(plan, {"weight": nn.Parameter(torch.zeros(10))}, config)
    assert (group.weights_bytes, group.masters_bytes, group.moments_bytes) == tuple(10 * size for size in sizes)
    assert group.averages_bytes == 0
