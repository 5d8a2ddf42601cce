"""Imports of an audit of a checkpoint."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from benchbox.dcp.metadata import MetadataUnpickler

if TYPE_CHECKING:
    from pathlib import Path

READ = """
import pathlib, sys
from benchbox.audit.subjects.checkpoint import read_checkpoint
for path in sys.argv[1:]:
    (facts,) = read_checkpoint(pathlib.Path(path))
    assert [parameter.name for parameter in facts.parameters] == ["weight"]
    print("torch.distributed.checkpoint" in sys.modules)
"""


def save(path: Path, suffix: str) -> Path:
    weights = {"weight": torch.ones(4, 4)}
    if suffix == "distributed":
        dcp.save({"model": weights}, checkpoint_id=path)
    elif suffix == "safetensors":
        save_file(weights, path)
    else:
        torch.save({"model": weights}, path)
    return path


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_in_a_distributed_checkpoint_are_read_by_either_name_of_their_module(module: str) -> None:
    """Python 3.13 writes the second."""
    paths = b"\x80\x02c" + module.encode() + b"\nPosixPath\nX\x01\x00\x00\x00a\x85R."
    assert MetadataUnpickler(io.BytesIO(paths)).load() == PurePosixPath("a")


def test_only_a_distributed_checkpoint_imports_torchs_distributed_checkpoints(tmp_path: Path) -> None:
    """They take longer to import than the rest of the audit."""
    paths = [save(tmp_path / f"model.{suffix}", suffix) for suffix in ("safetensors", "pt", "distributed")]
    done = subprocess.run([sys.executable, "-c", READ, *paths], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
