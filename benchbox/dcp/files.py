"""Writing shards to a DCP folder and reading them back, at any number of ranks and in any other split."""

from __future__ import annotations

import errno
import warnings
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from benchbox.dcp.metadata import load_metadata
from benchbox.dcp.shards import Shards, full_shards
from benchbox.dcp.untrusted import first_line
from benchbox.errors import MAKE_ROOM, CheckpointError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

METADATA = ".metadata"

# A single process, and a rank that reads by itself, are what is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def write_shards(folder: Path, tensors: Mapping[str, Shards], group: dist.ProcessGroup | None) -> None:
    """Write the tensors of all ranks of a group, each part once. All ranks must call it.

    Files are flushed to disk. A rank writes `__<rank>_<n>.distcp`, the first one `.metadata`.

    Raises:
        CheckpointError: on every rank, with the error of a rank that failed.
    """
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True)
    try:
        save_state_dict(
            dict(tensors), storage_writer=writer, planner=_SavePlanner(), process_group=group, no_dist=group is None
        )
    except CheckpointException as error:  # no subclass of Exception
        number, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"rank {number}: {describe_failure(cause)}", rank=number) from error


def describe_failure(error: BaseException) -> str:
    """Return class and message of the error of a write, and what to do where the disk is full."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{type(error).__name__}: {first_line(error)}{f'; {MAKE_ROOM}' if is_full else ''}"


class _Writer(FileSystemWriter):
    """Writer whose errors are those of the system.

    torch finishes its file also where the disk refused a part of it, and raises an error of its own about that. The one of the
    system is its context, which is lost when ranks send each other their errors.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause = error.__cause__ or error.__context__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if isinstance(error, OSError) or cause is None:
                raise
            raise cause from None


class TensorFolder:
    """A folder of tensors that `write_shards` wrote. Ranks read it by themselves.

    `layout` has shapes and dtypes of the tensors by their keys.

    Raises:
        DataError: its metadata is missing, damaged, or describes anything but tensors in files of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata = _read_metadata(path)
        entries = self._metadata.state_dict_metadata
        self.layout = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def read_into(self, tensors: Mapping[str, Shards]) -> None:
        """Copy the contents of the folder into the views of this rank, rounded to their dtypes.

        Raises:
            DataError: a file is damaged, or lacks a tensor, or has it in another shape.
        """
        reader = _SafeReader(self.path, self._metadata)
        try:
            load_state_dict(dict(tensors), storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise DataError(f"{self.path}: damaged ({first_line(cause)})") from error

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return full tensors by their keys, on the CPU and in the dtypes they were saved in.

        Raises:
            DataError: a file is damaged.
        """
        entries = {key: self.layout[key] for key in keys}
        tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
        self.read_into({key: full_shards(tensor) for key, tensor in tensors.items()})
        return tensors


def _read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA
    metadata = load_metadata(path)
    try:
        entries, locations = metadata.state_dict_metadata.items(), (metadata.storage_data or {}).values()
        for key, entry in entries:
            if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.properties.dtype, torch.dtype):
                raise DataError(f"{path}: {key} is no tensor")
            saved, elements = sum(prod(chunk.sizes) for chunk in entry.chunks), prod(entry.size)
            if saved != elements:  # torch reads what there is
                raise DataError(f"{path}: damaged ({saved} of the {elements} elements of {key} are in files)")
        for location in locations:
            name = str(location.relative_path)
            if "/" in name or not (folder / name).is_file():
                raise DataError(f"{folder}: {name}: missing; {METADATA} names it")
            if location.transform_descriptors:
                raise DataError(f"{folder}: {name}: compressed, which is not supported")
    except (AttributeError, TypeError) as error:  # records with other fields than theirs
        raise DataError(f"{path}: damaged ({first_line(error)})") from error
    return metadata


class _SafeReader(FileSystemReader):
    """Reader with metadata that was read safely: torch's own unpickles it, which may run code."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


class _SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's would take the shards for nested state, and copy them.
        self.original_state_dict, self.state_dict, self.mappings = state_dict, state_dict, {}
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        shards: Shards = self.state_dict[index.fqn]
        return shards.__get_tensor_shard__(index)
