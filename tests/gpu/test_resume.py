"""A training that is resumed on the device is the training that was never stopped."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.session.build import build_cell_policy, build_session, open_cell_data
from benchbox.spec.train import CheckpointSection
from benchbox.trainer.checkpoint import CheckpointManager
from tests.support.masters import all_equal
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchbox.session import Session
    from benchbox.spec.cell import Cell

STEPS, STOP = 5, 2


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def train(cell: Cell, folder: Path, *, resume: bool = False) -> tuple[Session, list[float]]:
    """Train to STEPS, saving after STOP steps or continuing from there; return the session and its losses."""
    checkpoints = CheckpointManager(folder, cell, CheckpointSection(every=STOP, keep=1, background=False))
    policy = build_cell_policy(cell)
    start = STOP if resume else 0
    with closing(open_cell_data(cell, policy, rank=0, start_step=start)) as stream:
        session = build_session(cell, policy, stream.statistics)
        if resume:
            checkpoints.restore(session, folder / f"step-{STOP:08d}")
        losses = []
        for step in range(start, STEPS):
            losses.append(float(session.step(stream).loss))
            if step + 1 == STOP:
                checkpoints.save(session, STOP)
    return session, losses


@pytest.mark.parametrize("recipe", ["bf16_master", "fp32_autocast"])
def test_a_resumed_training_is_the_same_bit_for_bit(
    device: torch.device, recipe: str, deterministic: None, tmp_path: Path
) -> None:
    cell = tiny_cell(backend="single", world_size=1, recipe=recipe, attention="eager")
    straight, losses = train(cell, tmp_path / "straight")
    _, repeated_losses = train(cell, tmp_path / "repeated")
    assert losses == repeated_losses, "two trainings without a stop differ already: some operation is not deterministic"
    resumed, later_losses = train(cell, tmp_path / "straight", resume=True)
    assert resumed.device == straight.device
    assert resumed.device.type == device.type
    assert later_losses == losses[STOP:]
    assert all_equal(resumed.model.parameters(), straight.model.parameters())
    states, expected = (session.backend.prepared.stepping.state_dict() for session in (resumed, straight))
    for index, state in expected["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(states["state"][index][name]), torch.as_tensor(value)), (index, name)
