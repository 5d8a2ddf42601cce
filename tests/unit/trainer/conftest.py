from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchbox.spec.cell import Cell
from benchbox.spec.train import CheckpointSection
from benchbox.trainer.checkpoint import CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cell() -> Cell:
    return Cell(policy="small", size="tiny", backend="single", world_size=1, batch=2)


@pytest.fixture
def checkpoints(tmp_path: Path, cell: Cell) -> CheckpointManager:
    return CheckpointManager(tmp_path / "checkpoints", cell, CheckpointSection(every=2, keep=2, background=False))
