"""Sharded checkpoints of `torch.distributed.checkpoint`, as FSDP writes them.

Each tensor lies in shards, each shard in the file of the rank that wrote it. What several ranks hold alike is written by one.
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

from benchbox.audit.subjects.checkpoint.files import build_rank_checkpoint
from benchbox.audit.subjects.checkpoint.optimizers import merge_models
from benchbox.audit.subjects.checkpoint.safe import load_bytes, load_metadata
from benchbox.audit.subjects.checkpoint.stored import StoredArray, ElementRange, RankCheckpoint, StoredSteppedTensor
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

METADATA = ".metadata"
# accelerate's save_state under FSDP puts the model and the optimizer into folders of their own.
_PARTS = ("pytorch_model_fsdp_*", "optimizer_*")
_WRITER = re.compile(r"^__(\d+)_\d+\.distcp$")
# Keys that wrap a model or an optimizer, and say nothing of which.
_WRAPPERS = frozenset({"model", "app", "state_dict", "optimizer", "optim", "module"})

Offsets = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spread(StoredArray):
    """A tensor in shards: (writer, shard) by where a shard begins."""

    shards: dict[Offsets, tuple[int, StoredArray]]


def distributed_folders(folder: Path) -> list[Path]:
    """The folders of distributed checkpoints that make up this one: itself, or those that accelerate put into it."""
    if (folder / METADATA).is_file():
        return [folder]
    return [part for pattern in _PARTS for part in sorted(folder.glob(pattern)) if (part / METADATA).is_file()]


def read_distributed(folders: Sequence[Path]) -> list[RankCheckpoint]:
    """Model and optimizer of a sharded checkpoint, for each rank that wrote a file of it.

    Raises:
        DataError: a file is damaged or missing.
    """
    models: dict[str, dict[str, StoredArray]] = defaultdict(dict)
    optimizers: dict[str, _Optimizer] = defaultdict(_Optimizer)
    writers: set[int] = set()
    for folder in folders:
        shards = _Shards(folder)
        writers |= shards.writers
        for key, path in shards.paths():
            value = shards.value(key)
            if (place := _index(path, "state")) is not None:
                optimizers[_label(path[:place])].state[path[place + 1]][str(path[-1])] = value
            elif (place := _index(path, "param_groups")) is not None:
                optimizers[_label(path[:place])].groups[path[place + 1]][str(path[-1])] = value
            elif isinstance(value, StoredArray):
                models[_label(path[:-1])][str(path[-1])] = value
    model = {name: value for name, value in merge_models(models).items() if value.dtype != "uint8" and value.ndim}
    whole = build_rank_checkpoint(model, [each.state_dict() for each in optimizers.values()], in_order=False)
    ranks = sorted(writers)
    return [
        replace(
            whole,
            rank=rank,
            world_size=len(ranks),
            model={name: shard for name, value in model.items() for _, shard in _written_by(rank, value)},
            stepped=[part for each in whole.stepped for part in _parts(each, rank)],
        )
        for rank in ranks
    ]


class _Optimizer:
    """An optimizer's state dictionary, put together again."""

    def __init__(self) -> None:
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.groups: dict[Any, dict[str, Any]] = defaultdict(dict)

    def state_dict(self) -> dict[str, Any]:
        """Flattened ones have a group for every parameter, under its name."""
        groups = [{"params": [place], **group} for place, group in self.groups.items()]
        groups = [{**group, "params": list(group["params"])} for group in groups]
        known = {key for group in groups for key in group["params"]}
        rest = [key for key in self.state if key not in known]
        return {"state": self.state, "param_groups": [*groups, *([{"params": rest}] if rest else [])]}


def _index(path: tuple[Any, ...], word: str) -> int | None:
    """Where a word stands in a path, if a parameter and a name follow."""
    return path.index(word) if word in path[:-2] else None


def _label(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path if part not in _WRAPPERS)


def _parts(each: StoredSteppedTensor, rank: int) -> Iterator[StoredSteppedTensor]:
    """What a rank wrote of a stepped tensor: of its weight, or of its state if that is all there is."""
    spread = each.weight or next((value for value in each.state.values() if value.shape), None)
    if spread is None:
        return
    for offsets, shard in _written_by(rank, spread):
        yield replace(
            each,
            weight=None if each.weight is None else shard,
            state={name: _beside(value, offsets) for name, value in each.state.items()},
            live=None if each.live is None else _run(each.live, offsets),
        )


def _run(live: ElementRange, offsets: Offsets) -> ElementRange:
    shard = _beside(live.held, offsets)
    return ElementRange(held=shard, start=0, stop=shard.elements)


def _written_by(rank: int, value: StoredArray) -> Iterator[tuple[Offsets, StoredArray]]:
    if isinstance(value, _Spread):
        for offsets, (writer, shard) in value.shards.items():
            if writer == rank:
                yield offsets, shard


def _beside(value: StoredArray, offsets: Offsets) -> StoredArray:
    """The shard at the same place, whoever wrote it; the tensor itself where it has none there, like a step count."""
    return value.shards[offsets][1] if isinstance(value, _Spread) and offsets in value.shards else value


class _Shards:
    """The files of one distributed checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = load_metadata(folder / METADATA)
        self._places: dict[str, list[tuple[Offsets, Any]]] = defaultdict(list)
        for index, place in (self._metadata.storage_data or {}).items():
            self._places[index.fqn].append((tuple(index.offset or ()), place))
        self._check()
        self.writers = {self._writer(place) for places in self._places.values() for _, place in places}

    def paths(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """(key, the way to it in the nested dictionary that was saved). Flattened optimizers have `state.<name>.exp_avg`."""
        planned = self._metadata.planner_data if isinstance(self._metadata.planner_data, dict) else {}
        for key in self._metadata.state_dict_metadata:
            path = tuple(planned.get(key, (key,)))
            for word in ("state", "param_groups"):
                if isinstance(path[-1], str) and path[-1].startswith(f"{word}.") and path[-1].count(".") > 1:
                    parameter, name = path[-1].removeprefix(f"{word}.").rsplit(".", 1)
                    path = (*path[:-1], word, parameter, name)
            yield key, path

    def value(self, key: str) -> Any:
        """A tensor in its shards, not yet read, or any other value."""
        kind = self._metadata.state_dict_metadata[key]
        places = self._places.get(key)
        if not places:
            raise DataError(f"{self._folder / METADATA}: names {key}, and no place where it is")
        if not isinstance(kind, TensorStorageMetadata):
            return self._load(places[0][1])
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in kind.chunks}
        dtype, ndim = kind.properties.dtype, len(kind.size)
        whole = _Spread(
            dtype=str(dtype).removeprefix("torch."),
            ndim=ndim,
            shape=tuple(kind.size),
            element_bytes=torch.empty(0, dtype=dtype).element_size(),
            read=self._reader(key, places[0][1]),
            shards={},
        )
        for offsets, place in places:
            shard = StoredArray(
                dtype=whole.dtype,
                ndim=ndim,
                shape=sizes.get(offsets, ()),
                element_bytes=whole.element_bytes,
                read=self._reader(key, place),
            )
            whole.shards[offsets] = self._writer(place), shard
        return whole

    def _check(self) -> None:
        """Every file is there and as long as it must be, before any is read."""
        ends: dict[str, int] = {}
        for places in self._places.values():
            for _, place in places:
                ends[place.relative_path] = max(ends.get(place.relative_path, 0), int(place.offset) + int(place.length))
        for name, end in ends.items():
            path = self._path(name)
            if not path.is_file():
                raise DataError(f"{path}: is missing; {METADATA} names it")
            if path.stat().st_size < end:
                raise DataError(f"{path}: damaged (it ends before its last tensor)")

    def _path(self, name: str) -> Path:
        """Whatever the metadata says, nothing outside the folder is read."""
        return self._folder / str(name).replace("\\", "/").rsplit("/", 1)[-1]

    def _writer(self, place: Any) -> int:
        match = _WRITER.match(self._path(place.relative_path).name)
        return int(match[1]) if match else 0

    def _reader(self, key: str, place: Any) -> Any:
        def read() -> Tensor:
            value = self._load(place)
            if not isinstance(value, Tensor):
                raise DataError(f"{self._path(place.relative_path)}: holds no tensor where {key} should be")
            return value

        return read

    def _load(self, place: Any) -> Any:
        path = self._path(place.relative_path)
        if getattr(place, "transform_descriptors", None):
            raise DataError(f"{path}: is compressed ({', '.join(place.transform_descriptors)}), which is not read here")
        with path.open("rb") as file:
            file.seek(int(place.offset))
            return load_bytes(io.BytesIO(file.read(int(place.length))), path)
