"""The check of a training without ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchbox.session.build import build_cell_policy
from benchbox.trainer.preview import _read_datasets
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    import pytest


def test_a_preview_puts_its_sample_on_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that runs may have taken all memory of the GPU, also what a second CUDA context needs."""
    cell = tiny_cell(backend="single", world_size=1)
    policy = build_cell_policy(cell)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _read_datasets(cell, policy) == (), "samples are generated"
