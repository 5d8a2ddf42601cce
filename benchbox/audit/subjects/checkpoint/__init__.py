"""Checkpoints as subjects of the audit: read without running anything in them, whoever wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.audit.subjects.checkpoint.distributed import distributed_folders, read_distributed
from benchbox.audit.subjects.checkpoint.files import (
    is_lerobot,
    is_state_folder,
    read_lerobot,
    read_model,
    read_state_folder,
    read_torch_file,
)
from benchbox.audit.subjects.checkpoint.stored import facts_of
from benchbox.audit.subjects.checkpoint.zero import read_zero, zero_folder
from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.audit.subjects.checkpoint.stored import Stored
    from benchbox.measure.witness.facts import RankFacts

_KNOWN = (
    "DeepSpeed ZeRO directories, torch.distributed.checkpoint (FSDP), accelerate's save_state, LeRobot's training_state, "
    "benchbox's own, safetensors and torch.save files are"
)


def read_checkpoint(path: Path) -> list[RankFacts]:
    """The facts of every rank that a checkpoint holds. What it is, is told from what lies there.

    Raises:
        DataError: there is no checkpoint, it is damaged, or it could only be read by running what is in it.
    """
    return [facts_of(stored) for stored in _read(path)]


def _read(path: Path) -> list[Stored]:
    if not path.exists():
        raise DataError(f"{path}: no such file or directory")
    if path.is_file():
        return read_model(path) if path.suffix == ".safetensors" else read_torch_file(path)
    for folder in (path, path / "training_state"):
        if folder.is_dir() and is_lerobot(folder):
            return read_lerobot(folder)
    if (zero := zero_folder(path)) is not None:
        return read_zero(zero)
    if folders := distributed_folders(path):
        return read_distributed(folders)
    if is_state_folder(path):
        return read_state_folder(path)
    raise DataError(f"{path}: holds no checkpoint that is known here; {_KNOWN}")
