"""Checkpoints, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.store.checkpoints import read_manifest

if TYPE_CHECKING:
    from pathlib import Path


def checksums(checkpoint: Path) -> dict[str, Any]:
    """Return size and checksum of every file with tensors or the state of the trainer.

    The index of the tensor files is left out: torch pickles it, and equal texts need not be one object in every process.
    """
    files = {name: entry for name, entry in read_manifest(checkpoint).files.items() if not name.endswith(".metadata")}
    assert len(files) > 1
    return files
