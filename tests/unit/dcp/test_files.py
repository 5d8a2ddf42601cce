"""Folders of tensors are on disk once they are written, and read from their own files only."""

from __future__ import annotations

import os
import pickle
import resource
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from benchbox.dcp.files import METADATA, TensorFolder, write_shards
from benchbox.dcp.metadata import load_metadata
from benchbox.dcp.shards import full_shards
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.metadata import Metadata


def test_every_rank_flushes_its_tensors_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 cannot flush what another node wrote to a shared file system, when it gives the checkpoint its name."""
    flushed: list[str] = []
    flush = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_shards(tmp_path, {"weight": full_shards(torch.ones(2))}, None)
    assert "__0_0.distcp" in flushed


@pytest.mark.parametrize("has_group", [False, True])
def test_a_write_that_the_system_refuses_has_the_reason_of_the_system(tmp_path: Path, has_group: bool) -> None:
    """torch then raises an error of its writer, `unexpected pos 704 vs 598`. Ranks send each other errors without context."""
    if has_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(DataError, match=r"^rank 0: OSError: \[Errno 27\] File too large$"):
            write_shards(tmp_path / "tensors", {"a": full_shards(torch.zeros(1 << 16))}, dist.GroupMember.WORLD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if has_group:
            dist.destroy_process_group()


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


def _drop_chunks(metadata: Metadata) -> None:
    metadata.state_dict_metadata["weight"] = replace(metadata.state_dict_metadata["weight"], chunks=[])


def _enlarge(metadata: Metadata) -> None:
    metadata.state_dict_metadata["weight"] = replace(metadata.state_dict_metadata["weight"], size=torch.Size([2**50]))


def _remove_tensors(metadata: Metadata) -> None:
    metadata.state_dict_metadata = None  # type: ignore[assignment]


def _name_no_file(metadata: Metadata) -> None:
    metadata.storage_data = dict.fromkeys(metadata.storage_data, 3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_chunks, r"damaged \(0 of the 2 elements of weight are in files\)"),
        (_enlarge, r"damaged \(2 of the \d+ elements of weight are in files\)"),
        (_remove_tensors, "damaged"),
        (_name_no_file, "damaged"),
    ],
)
def test_metadata_that_does_not_describe_whole_tensors_is_refused(
    tmp_path: Path, damage: Callable[[Metadata], None], message: str
) -> None:
    """Elements that no file has would be whatever was in memory."""
    write_shards(tmp_path, {"weight": full_shards(torch.ones(2))}, None)
    metadata = load_metadata(tmp_path / METADATA)
    metadata.storage_meta = None  # has a path, which is written as another class than it is read as
    damage(metadata)
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match=message):
        TensorFolder(tmp_path)
