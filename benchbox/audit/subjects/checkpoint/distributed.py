"""Sharded checkpoints of `torch.distributed.checkpoint`, as FSDP writes them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchbox.audit.subjects.checkpoint.safe import load_bytes, load_metadata
from benchbox.audit.subjects.checkpoint.stored import Stored, StoredTensor
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
# accelerate's save_state under FSDP puts the model and the optimizer into folders of their own.
_PARTS = ("pytorch_model_fsdp_*", "optimizer_*")


def distributed_folders(folder: Path) -> list[Path]:
    """The folders of distributed checkpoints that make up this one: itself, or those that accelerate put into it."""
    if (folder / METADATA).is_file():
        return [folder]
    return [part for pattern in _PARTS for part in sorted(folder.glob(pattern)) if (part / METADATA).is_file()]


def read_distributed(folders: Iterable[Path]) -> list[Stored]:
    """Model and optimizer of a sharded checkpoint. Of every tensor the first shard is looked at: the checkpoint may be larger
    than the memory.

    Raises:
        DataError: a file is damaged or missing.
    """
    model: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    groups: dict[Any, dict[str, Any]] = {}
    weights: dict[str, Tensor] = {}
    for folder in folders:
        shards = _Shards(folder)
        for key, path in shards.paths():
            if "state" in path[:-2]:
                place = path.index("state")
                state.setdefault(".".join(map(str, path[place + 1 : -1])), {})[str(path[-1])] = shards.value(key)
            elif "param_groups" in path[:-1]:
                groups.setdefault(path[path.index("param_groups") + 1], {})[str(path[-1])] = shards.value(key)
            elif isinstance(meta := shards.metadata.state_dict_metadata[key], TensorStorageMetadata):
                name = ".".join(map(str, path[1:] if len(path) > 1 and path[0] in {"model", "app"} else path))
                model[name] = torch.empty(meta.size, dtype=meta.properties.dtype, device="meta")
                weights[name] = shards.value(key)
    return [
        Stored(
            rank=0,
            world_size=1,
            optimizer="saved optimizer",
            model=model,
            stepped=[
                StoredTensor(
                    name=name,
                    weight=weights.get(name),
                    state=held,
                    options=_options(name, groups),
                    elements=model[name].numel() if name in model else None,
                )
                for name, held in state.items()
            ],
        )
    ]


def _options(name: str, groups: Mapping[Any, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of the group that names the parameter; of the only one, if none does."""
    for group in groups.values():
        if isinstance(group.get("params"), list) and name in group["params"]:
            return group
    return next(iter(groups.values())) if len(groups) == 1 else {}


class _Shards:
    """The files of one distributed checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.metadata: Metadata = load_metadata(folder / METADATA)
        self._first: dict[str, Any] = {}
        for index, stored in (self.metadata.storage_data or {}).items():
            self._first.setdefault(index.fqn, stored)

    def paths(self) -> list[tuple[str, tuple[Any, ...]]]:
        """(key, the way to it in the nested dictionary that was saved)"""
        planned = self.metadata.planner_data or {}
        return [(key, tuple(planned.get(key, key.split(".")))) for key in self.metadata.state_dict_metadata]

    def value(self, key: str) -> Any:
        """The first shard of a tensor, or a value."""
        stored = self._first.get(key)
        if stored is None:
            raise DataError(f"{self._folder / METADATA}: names {key}, and no place where it is")
        # Whatever the metadata says, nothing outside the folder is read.
        path = self._folder / str(stored.relative_path).replace("\\", "/").split("/")[-1]
        try:
            with path.open("rb") as file:
                file.seek(int(stored.offset))
                held = file.read(int(stored.length))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        return load_bytes(io.BytesIO(held), path)
