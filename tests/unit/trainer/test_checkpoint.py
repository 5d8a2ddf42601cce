"""A checkpoint is complete or absent, and is restored only by the configuration that saved it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from benchbox.errors import ConfigurationError, DataError
from benchbox.store.files import read_json
from benchbox.trainer.checkpoint import CheckpointManager
from tests.support.small_session import SmallSession, batches

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.spec.cell import Cell

FILES = ["checkpoint.json", "model.safetensors", "optimizer.pt", "rng-rank0.pt", "schedule.pt"]


def weights(session: SmallSession) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in session.model.state_dict().items()}


def test_a_checkpoint_has_the_documented_files_and_describes_itself(checkpoints: CheckpointManager, cell: Cell) -> None:
    session = SmallSession()
    folder = checkpoints.save(session, 3)
    assert folder.name == "step-00000003"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    description = read_json(folder / "checkpoint.json")
    assert (description["steps"], description["cell"]) == (3, cell.to_dict())
    stored = load_file(folder / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {"0.weight": torch.bfloat16, "0.bias": torch.bfloat16}
    assert all(torch.equal(stored[name], tensor) for name, tensor in weights(session).items())
    masters = torch.load(folder / "optimizer.pt", weights_only=True)["masters"]
    assert all(torch.equal(*pair) for pair in zip(masters, session.optimizer.masters, strict=True))


def test_the_newest_are_kept(checkpoints: CheckpointManager, tmp_path: Path) -> None:
    for steps in (1, 2, 10):
        checkpoints.save(SmallSession(), steps)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000010"]


def test_a_step_that_is_repeated_replaces_its_checkpoint(checkpoints: CheckpointManager) -> None:
    checkpoints.save(SmallSession(), 2)
    session = SmallSession(seed=1)
    folder = checkpoints.save(session, 2)
    assert torch.equal(load_file(folder / "model.safetensors")["0.weight"], weights(session)["0.weight"])


def test_what_an_interrupted_save_left_is_not_in_the_next_checkpoint(checkpoints: CheckpointManager, tmp_path: Path) -> None:
    partial = tmp_path / "checkpoints" / ".partial-step-00000002"
    partial.mkdir(parents=True)
    (partial / "rng-rank7.pt").write_bytes(b"")
    folder = checkpoints.save(SmallSession(), 2)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert not partial.exists()


def test_a_save_that_fails_leaves_no_checkpoint(
    checkpoints: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("benchbox.trainer.checkpoint.write_description", fail)
    with pytest.raises(OSError, match="no space left"):
        checkpoints.save(SmallSession(), 2)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_checkpoint_of_another_configuration_is_refused(checkpoints: CheckpointManager, cell: Cell, tmp_path: Path) -> None:
    """Before anything in the session has changed."""
    folder = checkpoints.save(SmallSession(), 2)
    session = SmallSession(seed=1)
    before = weights(session)
    another = CheckpointManager(tmp_path / "checkpoints", replace(cell, batch=4), interval=2, keep=2)
    with pytest.raises(ConfigurationError, match="batch is 2 there and 4 here"):
        another.restore(session, folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(session).items())


@pytest.mark.parametrize("name", [name for name in FILES if name != "checkpoint.json"])
@pytest.mark.parametrize("damage", ["cut off", "missing"])
def test_a_damaged_checkpoint_is_named_and_not_restored_in_part(checkpoints: CheckpointManager, name: str, damage: str) -> None:
    trained = SmallSession()
    trained.step(batches())
    folder = checkpoints.save(trained, 1)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage == "cut off":
        (folder / name).write_bytes(content[: len(content) // 2])
    session = SmallSession(seed=1)
    before = weights(session)
    with pytest.raises(DataError, match=r"step-00000001: damaged checkpoint .*; remove it to resume from the previous one"):
        checkpoints.restore(session, folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(session).items())
