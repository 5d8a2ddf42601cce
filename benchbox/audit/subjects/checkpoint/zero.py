"""DeepSpeed's ZeRO checkpoints: one optimizer file a rank, masters and state in flat partitions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from benchbox.audit.subjects.checkpoint.layout import ParameterSpan, runs, shards
from benchbox.audit.subjects.checkpoint.optimizers import (
    weight_decay_groups,
    is_model_state,
    is_optimizer_state,
    merge_models,
    optimizer_kind,
    read_parameter_states,
)
from benchbox.audit.subjects.checkpoint.safe import load_file
from benchbox.audit.subjects.checkpoint.stored import StoredArray, ElementRange, RankCheckpoint, StoredSteppedTensor, held
from benchbox.errors import DataError
from benchbox.observer.facts import OpaqueOptimizer
from benchbox.observer.introspect.names import own_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from benchbox.audit.subjects.checkpoint.layout import Shapes
    from benchbox.audit.subjects.checkpoint.optimizers import ParameterState

_OPTIMIZER_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MODEL_FILE = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")


class _RankFile(NamedTuple):
    """One `*_optim_states.pt`: the masters of each partition, the optimizer that stepped them, and its wrapper's name."""

    masters: list[Tensor]
    inner: Mapping[str, Any]
    stage3: bool
    wrapper: str


def zero_folder(folder: Path) -> Path | None:
    """The folder that holds the files of the ranks: this one, or the one that `latest` names. None if this is no such
    checkpoint.
    """
    latest = folder / "latest"
    named = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    for each in (folder, *([folder / named.replace("\\", "/").rsplit("/", 1)[-1]] if named else [])):
        if each.is_dir() and any(_MODEL_FILE.match(path.name) or _OPTIMIZER_FILE.search(path.name) for path in each.iterdir()):
            return each
    return None


def read_zero(folder: Path) -> list[RankCheckpoint]:
    """Every rank of a ZeRO-1, 2 or 3 checkpoint.

    Raises:
        DataError: a file is damaged or missing.
    """
    optimizers = {
        (int(match[2]), int(match[1])): path for path in folder.iterdir() if (match := _OPTIMIZER_FILE.search(path.name))
    }
    models = {(int(match[2]), int(match[1] or 0)): path for path in folder.iterdir() if (match := _MODEL_FILE.match(path.name))}
    if not optimizers or not models:
        raise DataError(f"{folder}: holds no {'*_model_states.pt' if optimizers else '*_optim_states.pt'} of its ranks")
    ranks: list[RankCheckpoint] = []
    for parallel in sorted({parallel for parallel, _ in optimizers}):
        files = {rank: path for (part, rank), path in optimizers.items() if part == parallel}
        ranks += _read_group(folder, parallel, files, {rank: path for (part, rank), path in models.items() if part == parallel})
    return [replace(each, rank=rank, world_size=len(ranks)) for rank, each in enumerate(ranks)]


def _read_group(
    folder: Path, parallel: int, optimizers: Mapping[int, Path], models: Mapping[int, Path]
) -> list[RankCheckpoint]:
    """The data-parallel ranks of one part of the model."""
    if 0 not in models:
        raise DataError(f"{folder}: holds no *mp_rank_{parallel:02d}_model_states.pt")
    described = _model_file(models[0])
    world = int(described.get("dp_world_size") or max(optimizers) + 1)
    if missing := [rank for rank in range(world) if rank not in optimizers]:
        raise DataError(f"{folder}: the optimizer states of rank {', '.join(map(str, missing))} of {world} are missing")
    shapes = [
        {name: tuple(int(size) for size in shape) for name, shape in group.items()} for group in described["param_shapes"] or ()
    ]
    files = [_rank_file(optimizers[rank]) for rank in range(world)]
    stored = []
    for rank, file in enumerate(files):
        module = _model_file(models[rank])["module"] if rank in models else described["module"]
        model = merge_models({"": module})
        common: dict[str, Any] = {"model": model, "buffers": _buffers(described)}
        if file is None:
            reason = f"the layout of {optimizers[rank].name} is not known here"
            stored.append(RankCheckpoint(stepped=(), opaque=(OpaqueOptimizer(optimizer="DeepSpeed", reason=reason),), **common))
            continue
        inner = read_parameter_states(file.inner, {})
        stored.append(
            RankCheckpoint(
                optimizer_chain=(file.wrapper, optimizer_kind(inner)),
                stepped=list(_stepped(file, inner, _places(files, rank, shapes), shapes, model)),
                groups=weight_decay_groups(file.inner),
                **common,
            )
        )
    return stored


def _model_file(path: Path) -> Mapping[str, Any]:
    value = load_file(path)
    if (
        not isinstance(value, dict)
        or not is_model_state(value.get("module"))
        or not isinstance(value.get("param_shapes", []), list)
    ):
        raise DataError(f"{path}: holds no model of DeepSpeed")
    return {"param_shapes": None} | value


def _buffers(described: Mapping[str, Any]) -> frozenset[str] | None:
    names = described.get("buffer_names")
    return frozenset(own_name(str(name)) for name in names) if isinstance(names, list) else None


def _rank_file(path: Path) -> _RankFile | None:
    """None if it is laid out in another way than those of ZeRO-1, 2 and 3."""
    value = load_file(path)
    state = value.get("optimizer_state_dict") if isinstance(value, dict) else None
    if not isinstance(state, dict):
        raise DataError(f"{path}: holds no optimizer_state_dict")
    if "fp32_flat_groups" in state:
        masters, inner, wrapper = state["fp32_flat_groups"], state.get("optimizer_state_dict"), "DeepSpeedZeroOptimizer_Stage3"
    else:
        masters, inner = state.get("single_partition_of_fp32_groups"), state.get("base_optimizer_state")
        wrapper = "DeepSpeedZeroOptimizer" if "loss_scaler" in state else "BF16_Optimizer"
    if not isinstance(masters, list) or not isinstance(inner, dict) or not is_optimizer_state(inner):
        return None
    stepped = sum(len(group["params"]) for group in inner["param_groups"])
    if stepped != len(masters) or not all(isinstance(each, Tensor) for each in masters):
        return None
    return _RankFile(masters, inner, "fp32_flat_groups" in state, wrapper)


def _places(files: Sequence[_RankFile | None], rank: int, shapes: Sequence[Shapes]) -> list[list[ParameterSpan]]:
    """What lies in each partition of a rank; nothing where that is not known."""
    file = files[rank]
    assert file is not None
    if file.stage3:
        return shards([master.numel() for master in file.masters], rank, len(files), shapes)
    known = [each for each in files if each is not None and len(each.masters) == len(shapes)]
    if len(known) < len(files):
        return [[] for _ in file.masters]
    return [runs(group, [each.masters[index].numel() for each in known], rank) for index, group in enumerate(shapes)]


def _stepped(
    file: _RankFile,
    inner: Sequence[ParameterState],
    places: Sequence[Sequence[ParameterSpan]],
    shapes: Sequence[Shapes],
    model: Mapping[str, StoredArray],
) -> Iterator[StoredSteppedTensor]:
    dimensions = {own_name(name): len(shape) for group in shapes for name, shape in group.items()}
    attribute = "fp32_partitioned_groups_flat" if file.stage3 else "single_partition_of_fp32_groups"
    for index, each in enumerate(inner):
        master = file.masters[index]
        if not places[index]:
            name = f"{file.wrapper}.{attribute}[{index}]"
            covers = tuple(own_name(name) for name in shapes[index]) if len(shapes) == len(file.masters) else ()
            yield _part(each, master, ParameterSpan(name, 0, master.numel(), 0), covers, None, None)
        for place in places[index]:
            yield _part(each, master, place, (), model.get(place.name), dimensions[place.name])


def _part(
    each: ParameterState,
    master: Tensor,
    place: ParameterSpan,
    covers: tuple[str, ...],
    live: StoredArray | None,
    ndim: int | None,
) -> StoredSteppedTensor:
    """A partition, or the part of it that belongs to one parameter, with the same part of the state."""
    size = place.stop - place.start
    whole = tuple(master.shape)
    return StoredSteppedTensor(
        name=place.name,
        optimizer=optimizer_kind([each]),
        dtype=held(master).dtype,
        weight=held(master[place.start : place.stop]),
        state={
            name: held(value.read()[place.start : place.stop]) if value.shape == whole else value
            for name, value in each.state.items()
        },
        options=each.options,
        step_count=each.step_count,
        is_master=True,
        # ZeRO-3 leaves an empty tensor of the live dtype where a parameter is spread over the ranks.
        live=ElementRange(held=live, start=place.begin, stop=place.begin + size)
        if live is not None and live.elements
        else None,
        live_dtype=None if live is None else live.dtype,
        ndim=ndim,
        covers=covers,
    )
