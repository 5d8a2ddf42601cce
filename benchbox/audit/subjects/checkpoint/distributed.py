"""Sharded checkpoints of `torch.distributed.checkpoint`, as FSDP writes them.

Each tensor is split into shards, each shard in the file of the rank that wrote it. Replicated tensors are written by one rank.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchbox.audit.subjects.checkpoint.files import METADATA, build_rank_checkpoint
from benchbox.audit.subjects.checkpoint.optimizers import is_average, merge_models
from benchbox.audit.subjects.checkpoint.safe import load_torch_bytes
from benchbox.audit.subjects.checkpoint.stored import ElementRange, RankCheckpoint, StoredArray, StoredSteppedTensor
from benchbox.dcp.metadata import load_metadata
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_WRITER = re.compile(r"^__(\d+)_\d+\.distcp$")
# Keys that wrap a model or an optimizer, and do not identify it.
_WRAPPERS = frozenset({"model", "app", "state_dict", "optimizer", "optim", "module"})

Offsets = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardedArray(StoredArray):
    """A tensor in shards: (writer, shard) by the offsets of the shard."""

    shards: dict[Offsets, tuple[int, StoredArray]]


def read_distributed(folders: Sequence[Path]) -> list[RankCheckpoint]:
    """Read model and optimizer of a sharded checkpoint, for each rank that wrote a file of it.

    Raises:
        DataError: a file is damaged or missing.
    """
    models: dict[str, dict[str, StoredArray]] = defaultdict(dict)
    optimizers: dict[str, _OptimizerBuilder] = defaultdict(_OptimizerBuilder)
    writers: set[int] = set()
    for folder in folders:
        files = _ShardFiles(folder)
        writers |= files.writers
        for key, path in files.paths():
            value = files.read(key)
            if (index := _key_index(path, "state")) is not None:
                optimizers[_label(path[:index])].state[path[index + 1]][str(path[-1])] = value
            elif (index := _key_index(path, "param_groups")) is not None:
                optimizers[_label(path[:index])].groups[path[index + 1]][str(path[-1])] = value
            elif isinstance(value, StoredArray) and not any(is_average(str(part)) for part in path[:-1]):
                models[_label(path[:-1])][str(path[-1])] = value
    model = {name: array for name, array in merge_models(models).items() if array.dtype != "uint8" and array.ndim}
    state_dicts = [optimizer.state_dict() for optimizer in optimizers.values()]
    unsharded = build_rank_checkpoint(model, state_dicts, in_order=False)
    ranks = sorted(writers)
    return [
        replace(
            unsharded,
            rank=rank,
            world_size=len(ranks),
            model={name: shard for name, array in model.items() for _, shard in _shards_written_by(rank, array)},
            stepped=[shard for tensor in unsharded.stepped for shard in _tensor_shards(tensor, rank)],
        )
        for rank in ranks
    ]


class _OptimizerBuilder:
    """Collects the entries of an optimizer's state dictionary."""

    def __init__(self) -> None:
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.groups: dict[Any, dict[str, Any]] = defaultdict(dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dictionary. Flattened ones have a group for every parameter, under its name."""
        groups = [{"params": [key], **group} for key, group in self.groups.items()]
        groups = [{**group, "params": list(group["params"])} for group in groups]
        grouped = {key for group in groups for key in group["params"]}
        ungrouped = [key for key in self.state if key not in grouped]
        return {"state": self.state, "param_groups": [*groups, *([{"params": ungrouped}] if ungrouped else [])]}


def _key_index(path: tuple[Any, ...], key: str) -> int | None:
    """Return the index of a key in a path, if a parameter and a name follow it."""
    return path.index(key) if key in path[:-2] else None


def _label(path: tuple[Any, ...]) -> str:
    return ".".join(str(key) for key in path if key not in _WRAPPERS)


def _tensor_shards(tensor: StoredSteppedTensor, rank: int) -> Iterator[StoredSteppedTensor]:
    """Yield the shards of a stepped tensor that a rank wrote: of its weight, or of its state if only that is stored."""
    array = tensor.weight or next((array for array in tensor.state.values() if array.shape), None)
    if array is None:
        return
    for offsets, shard in _shards_written_by(rank, array):
        yield replace(
            tensor,
            weight=None if tensor.weight is None else shard,
            shape=shard.shape if array.shape == tensor.shape else tensor.shape,
            state={name: _shard_at(state, offsets) for name, state in tensor.state.items()},
            live=None if tensor.live is None else _shard_range(tensor.live, offsets),
        )


def _shard_range(live: ElementRange, offsets: Offsets) -> ElementRange:
    shard = _shard_at(live.array, offsets)
    return ElementRange(array=shard, start=0, stop=shard.elements)


def _shards_written_by(rank: int, array: StoredArray) -> Iterator[tuple[Offsets, StoredArray]]:
    if isinstance(array, _ShardedArray):
        for offsets, (writer, shard) in array.shards.items():
            if writer == rank:
                yield offsets, shard


def _shard_at(array: StoredArray, offsets: Offsets) -> StoredArray:
    """Return the shard at these offsets, whichever rank wrote it; the tensor itself if it has none, like a step count."""
    return array.shards[offsets][1] if isinstance(array, _ShardedArray) and offsets in array.shards else array


class _ShardFiles:
    """The files of one distributed checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = load_metadata(folder / METADATA)
        self._locations: dict[str, list[tuple[Offsets, Any]]] = defaultdict(list)
        for index, location in (self._metadata.storage_data or {}).items():
            self._locations[index.fqn].append((tuple(index.offset or ()), location))
        self._check()
        self.writers = {self._writer(location) for shards in self._locations.values() for _, location in shards}

    def paths(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield (key, its path in the nested dictionary that was saved). Flattened optimizers have `state.<name>.exp_avg`."""
        planned = self._metadata.planner_data if isinstance(self._metadata.planner_data, dict) else {}
        for key in self._metadata.state_dict_metadata:
            path = tuple(planned.get(key, (key,)))
            for section in ("state", "param_groups"):
                if isinstance(path[-1], str) and path[-1].startswith(f"{section}.") and path[-1].count(".") > 1:
                    parameter, name = path[-1].removeprefix(f"{section}.").rsplit(".", 1)
                    path = (*path[:-1], section, parameter, name)
            yield key, path

    def read(self, key: str) -> Any:
        """Return a tensor in its shards, whose values are not read yet, or any other value."""
        metadata = self._metadata.state_dict_metadata[key]
        locations = self._locations.get(key)
        if not locations:
            raise DataError(f"{self._folder / METADATA}: names {key}, and no place where it is")
        if not isinstance(metadata, TensorStorageMetadata):
            return self._load(locations[0][1])
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in metadata.chunks}
        dtype, ndim = metadata.properties.dtype, len(metadata.size)
        array = _ShardedArray(
            dtype=str(dtype).removeprefix("torch."),
            ndim=ndim,
            shape=tuple(metadata.size),
            element_bytes=torch.empty(0, dtype=dtype).element_size(),
            read=self._reader(key, locations[0][1]),
            shards={},
        )
        for offsets, location in locations:
            shard = StoredArray(
                dtype=array.dtype,
                ndim=ndim,
                shape=sizes.get(offsets, ()),
                element_bytes=array.element_bytes,
                read=self._reader(key, location),
            )
            array.shards[offsets] = self._writer(location), shard
        return array

    def _check(self) -> None:
        """Check before any file is read that all exist and are long enough."""
        ends: dict[str, int] = {}
        for locations in self._locations.values():
            for _, location in locations:
                end = int(location.offset) + int(location.length)
                ends[location.relative_path] = max(ends.get(location.relative_path, 0), end)
        for name, end in ends.items():
            path = self._path(name)
            if not path.is_file():
                raise DataError(f"{path}: is missing; {METADATA} names it")
            if path.stat().st_size < end:
                raise DataError(f"{path}: damaged (it ends before its last tensor)")

    def _path(self, name: str) -> Path:
        """Return the path of a file in the folder: whatever the metadata says, nothing outside the folder is read."""
        return self._folder / str(name).replace("\\", "/").rsplit("/", 1)[-1]

    def _writer(self, location: Any) -> int:
        match = _WRITER.match(self._path(location.relative_path).name)
        return int(match[1]) if match else 0

    def _reader(self, key: str, location: Any) -> Callable[[], Tensor]:
        def read() -> Tensor:
            value = self._load(location)
            if not isinstance(value, Tensor):
                raise DataError(f"{self._path(location.relative_path)}: holds no tensor where {key} should be")
            return value

        return read

    def _load(self, location: Any) -> Any:
        path = self._path(location.relative_path)
        if getattr(location, "transform_descriptors", None):
            raise DataError(f"{path}: is compressed ({', '.join(location.transform_descriptors)}), which is not supported")
        with path.open("rb") as file:
            file.seek(int(location.offset))
            return load_torch_bytes(io.BytesIO(file.read(int(location.length))), path)
