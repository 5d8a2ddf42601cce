"""A folder of tensors is read from its own files only."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.dcp.files import METADATA, TensorFolder, write_shards
from benchbox.dcp.metadata import load_metadata
from benchbox.dcp.shards import full_shards
from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


def test_metadata_that_names_a_file_of_another_folder_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_shards(tmp_path / name, {"weight": full_shards(torch.ones(2))}, None)
    metadata = load_metadata(tmp_path / "two" / METADATA)
    metadata.storage_meta = None  # has a path, which is written as another class than it is read as
    metadata.storage_data = {
        index: replace(location, relative_path=f"../one/{location.relative_path}")
        for index, location in metadata.storage_data.items()
    }
    (tmp_path / "two" / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match=r"\.\./one/__0_0\.distcp: missing; \.metadata names it"):
        TensorFolder(tmp_path / "two")
