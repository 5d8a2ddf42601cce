"""Checkpoints on disk that no training has saved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from benchbox.store.checkpoints import CheckpointManifest, begin_checkpoint, describe_files, publish_checkpoint
from tests.support.example_run import CELL

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from benchbox.spec.cell import Cell


def save_checkpoint(
    folder: Path,
    steps: int,
    cell: Cell = CELL,
    score: float | None = None,
    mode: str | None = None,
    episodes: int | None = None,
    validation: Mapping[str, Any] = {},
) -> Path:
    """Save a checkpoint that has one file."""
    partial = begin_checkpoint(folder, steps)
    (partial / "tensors.bin").write_bytes(os.urandom(4096))
    CheckpointManifest(
        steps=steps,
        samples=8 * steps,
        cell=cell.to_dict(),
        config=None
        if mode is None
        else {"checkpoint": {"keep_best": {"metric": "loss", "mode": mode}}, "validation": validation},
        topology={},
        recipe=cell.recipe,
        trainable_only=False,
        score=score,
        files=describe_files(partial, [partial / "tensors.bin"]),
        versions={},
        data=None if episodes is None else [{"dataset": "robots/a", "episodes": episodes}],
    ).write(partial)
    return publish_checkpoint(folder, steps)
