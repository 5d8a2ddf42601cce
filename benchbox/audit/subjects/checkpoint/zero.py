"""DeepSpeed's ZeRO checkpoints: one optimizer file for each rank, masters and state in flat partitions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from benchbox.audit.subjects.checkpoint.layout import ParameterSpan, partition_spans, zero3_spans
from benchbox.audit.subjects.checkpoint.optimizers import (
    is_model_state,
    is_optimizer_state,
    merge_models,
    optimizer_kind,
    read_parameter_states,
    weight_decay_groups,
)
from benchbox.audit.subjects.checkpoint.safe import load_torch_file
from benchbox.audit.subjects.checkpoint.stored import (
    ElementRange,
    RankCheckpoint,
    StoredArray,
    StoredSteppedTensor,
    describe_tensor,
)
from benchbox.errors import DataError
from benchbox.observer.facts import OpaqueOptimizer
from benchbox.observer.introspect.names import unwrapped_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from benchbox.audit.subjects.checkpoint.layout import Shapes
    from benchbox.audit.subjects.checkpoint.optimizers import ParameterState

_OPTIMIZER_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MODEL_FILE = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")

_LAYER_FILE = re.compile(r"^layer_(\d+)-model_states\.pt$")


class _OptimizerFile(NamedTuple):
    """One `*_optim_states.pt`: the masters of each partition, the optimizer that stepped them, and the name of its wrapper."""

    masters: list[Tensor]
    inner: Mapping[str, Any]
    stage3: bool
    wrapper: str


def zero_folder(folder: Path) -> Path | None:
    """Return the folder with the files of the ranks: this one, or the one that `latest` names. None if this is no ZeRO
    checkpoint.
    """
    latest = folder / "latest"
    tag = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    for candidate in (folder, *([folder / tag.replace("\\", "/").rsplit("/", 1)[-1]] if tag else [])):
        if candidate.is_dir() and any(
            _MODEL_FILE.match(path.name) or _OPTIMIZER_FILE.search(path.name) for path in candidate.iterdir()
        ):
            return candidate
    return None


def has_partitions(folder: Path) -> bool:
    """Return whether a folder holds the optimizer files of ZeRO, or one of its ranks."""
    return any(_OPTIMIZER_FILE.search(path.name) for path in folder.iterdir())


def zero_model_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the files with models in a folder, by model-parallel and data-parallel rank."""
    return {(int(match[2]), int(match[1] or 0)): path for path in folder.iterdir() if (match := _MODEL_FILE.match(path.name))}


def read_zero(folder: Path) -> list[RankCheckpoint]:
    """Read every rank of a checkpoint of ZeRO-1, 2 or 3.

    Raises:
        DataError: a file is damaged or missing.
    """
    optimizers = {
        (int(match[2]), int(match[1])): path for path in folder.iterdir() if (match := _OPTIMIZER_FILE.search(path.name))
    }
    models = zero_model_files(folder)
    if not models:
        raise DataError(f"{folder}: holds no *_model_states.pt of its ranks")
    ranks: list[RankCheckpoint] = []
    for model_rank in sorted({model_rank for model_rank, _ in optimizers}):
        optimizer_files = {rank: path for (part, rank), path in optimizers.items() if part == model_rank}
        model_files = {rank: path for (part, rank), path in models.items() if part == model_rank}
        ranks += _read_group(folder, model_rank, optimizer_files, model_files)
    return [replace(checkpoint, rank=rank, world_size=len(ranks)) for rank, checkpoint in enumerate(ranks)]


def _read_group(
    folder: Path, model_rank: int, optimizers: Mapping[int, Path], models: Mapping[int, Path]
) -> list[RankCheckpoint]:
    """Read the data-parallel ranks of one model-parallel rank."""
    if 0 not in models:
        raise DataError(f"{folder}: holds no *mp_rank_{model_rank:02d}_model_states.pt")
    metadata = read_model_file(models[0])
    world_size = int(metadata.get("dp_world_size") or max(optimizers) + 1)
    if missing := [rank for rank in range(world_size) if rank not in optimizers]:
        raise DataError(f"{folder}: the optimizer states of rank {', '.join(map(str, missing))} of {world_size} are missing")
    shapes = [
        {name: tuple(int(size) for size in shape) for name, shape in group.items()} for group in metadata["param_shapes"] or ()
    ]
    files = [_read_optimizer_file(optimizers[rank]) for rank in range(world_size)]
    checkpoints = []
    for rank, file in enumerate(files):
        module = read_model_file(models[rank])["module"] if rank in models else metadata["module"]
        model = merge_models({"": module})
        unoptimized = _unoptimized_names(metadata, model) if rank == 0 else frozenset()
        common: dict[str, Any] = {"model": model, "buffers": buffer_names(metadata), "unoptimized": unoptimized}
        if file is None:
            opaque = OpaqueOptimizer(optimizer="DeepSpeed", reason=f"the layout of {optimizers[rank].name} is not supported")
            checkpoints.append(RankCheckpoint(stepped=(), opaque=(opaque,), **common))
            continue
        parameters = read_parameter_states(file.inner)
        spans = _partition_layout(files, rank, shapes)
        checkpoints.append(
            RankCheckpoint(
                optimizer_chain=(file.wrapper, optimizer_kind(parameters)),
                stepped=list(_stepped_tensors(file, parameters, spans, shapes, model)),
                groups=weight_decay_groups(file.inner),
                **common,
            )
        )
    return checkpoints


def read_model_file(path: Path) -> Mapping[str, Any]:
    """Read a `*_model_states.pt`.

    Raises:
        DataError: it is damaged, or holds no model.
    """
    value = load_torch_file(path)
    shapes = (value.get("param_shapes") or []) if isinstance(value, dict) else None
    if not isinstance(shapes, list) or not all(isinstance(group, dict) for group in shapes):
        raise DataError(f"{path}: holds no model of DeepSpeed")
    if value.get("module") is None and shapes:
        names = {str(name) for group in shapes for name in group}
        value |= {"module": {name: tensor for name, tensor in _read_layers(path.parent).items() if name in names}}
    if not is_model_state(value.get("module")):
        is_stage = any(_LAYER_FILE.match(file.name) for file in path.parent.iterdir())
        hint = "; stages of a pipeline are read with ZeRO only" if is_stage else ""
        raise DataError(f"{path}: holds no model of DeepSpeed{hint}")
    state: dict[str, Any] = {"param_shapes": None, **value}
    return state


def _read_layers(folder: Path) -> dict[str, Any]:
    """Read the layers of a pipeline, which DeepSpeed saves in files of their own. Names of parameters begin with the layer."""
    layers = {int(match[1]): path for path in folder.iterdir() if (match := _LAYER_FILE.match(path.name))}
    states = {layer: load_torch_file(path) for layer, path in sorted(layers.items())}
    return {
        f"{layer}.{name}": value for layer, state in states.items() if isinstance(state, dict) for name, value in state.items()
    }


def buffer_names(metadata: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names of the buffers that DeepSpeed lists beside its model; None where it lists none."""
    names = metadata.get("buffer_names")
    return frozenset(unwrapped_name(str(name)) for name in names) if isinstance(names, list) else None


def _unoptimized_names(metadata: Mapping[str, Any], model: Collection[str]) -> frozenset[str]:
    """Return the parameters that DeepSpeed lists neither among those it optimizes nor among frozen or shared ones."""
    optimized, frozen, shared = (metadata.get(key) for key in ("param_shapes", "frozen_param_shapes", "shared_params"))
    buffers = buffer_names(metadata)
    if not optimized or not isinstance(frozen, dict) or not isinstance(shared, dict) or buffers is None:
        return frozenset()
    listed = {str(name) for group in (*optimized, frozen) for name in group}
    listed |= {str(name) for pair in shared.items() for name in pair}
    return frozenset(model) - {unwrapped_name(name) for name in listed} - buffers


def _read_optimizer_file(path: Path) -> _OptimizerFile | None:
    """Read the optimizer of a rank; None if its layout is not that of ZeRO-1, 2 or 3."""
    value = load_torch_file(path)
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
    if stepped != len(masters) or not all(isinstance(master, Tensor) for master in masters):
        return None
    return _OptimizerFile(masters, inner, "fp32_flat_groups" in state, wrapper)


def _partition_layout(files: Sequence[_OptimizerFile | None], rank: int, shapes: Sequence[Shapes]) -> list[list[ParameterSpan]]:
    """Return the spans in each partition of a rank; none where they are not known."""
    file = files[rank]
    assert file is not None
    if file.stage3:
        return zero3_spans([master.numel() for master in file.masters], rank, len(files), shapes)
    readable = [rank_file for rank_file in files if rank_file is not None and len(rank_file.masters) == len(shapes)]
    if len(readable) < len(files):
        return [[] for _ in file.masters]
    return [
        partition_spans(group, [rank_file.masters[index].numel() for rank_file in readable], rank)
        for index, group in enumerate(shapes)
    ]


def _stepped_tensors(
    file: _OptimizerFile,
    parameters: Sequence[ParameterState],
    layout: Sequence[Sequence[ParameterSpan]],
    shapes: Sequence[Shapes],
    model: Mapping[str, StoredArray],
) -> Iterator[StoredSteppedTensor]:
    ndims = {unwrapped_name(name): len(shape) for group in shapes for name, shape in group.items()}
    attribute = "fp32_partitioned_groups_flat" if file.stage3 else "single_partition_of_fp32_groups"
    for index, parameter in enumerate(parameters):
        master = file.masters[index]
        if not layout[index]:
            name = f"{file.wrapper}.{attribute}[{index}]"
            covers = tuple(unwrapped_name(name) for name in shapes[index]) if len(shapes) == len(file.masters) else ()
            yield _slice_partition(parameter, master, ParameterSpan(name, 0, master.numel(), 0), covers, None, None)
        for span in layout[index]:
            yield _slice_partition(parameter, master, span, (), model.get(span.name), ndims[span.name])


def _slice_partition(
    parameter: ParameterState,
    master: Tensor,
    span: ParameterSpan,
    covers: tuple[str, ...],
    live: StoredArray | None,
    ndim: int | None,
) -> StoredSteppedTensor:
    """Return the slice of a partition that belongs to one parameter, with the same slice of the state."""
    size = span.stop - span.start
    partition_shape = tuple(master.shape)
    return StoredSteppedTensor(
        name=span.name,
        optimizer=optimizer_kind([parameter]),
        dtype=describe_tensor(master).dtype,
        weight=describe_tensor(master[span.start : span.stop]),
        state={
            name: describe_tensor(array.read()[span.start : span.stop]) if array.shape == partition_shape else array
            for name, array in parameter.state.items()
        },
        options=parameter.options,
        step_count=parameter.step_count,
        is_master=True,
        # ZeRO-3 leaves an empty tensor of the live dtype where a parameter is spread over the ranks.
        live=(
            ElementRange(array=live, start=span.offset, stop=span.offset + size) if live is not None and live.elements else None
        ),
        live_dtype=None if live is None else live.dtype,
        ndim=ndim,
        covers=covers,
    )
