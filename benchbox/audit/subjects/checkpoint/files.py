"""Checkpoints of one process: the formats of `torch.save`, safetensors, accelerate, transformers, LeRobot and benchbox."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors

from benchbox.audit.subjects.checkpoint.linking import link_weights
from benchbox.audit.subjects.checkpoint.optimizers import (
    collect_models,
    has_known_arithmetic,
    is_average,
    is_optimizer_state,
    merge_models,
    optimizer_kind,
    read_parameter_states,
    walk_mappings,
    weight_decay_groups,
)
from benchbox.audit.subjects.checkpoint.placeholders import PlaceholderObject
from benchbox.audit.subjects.checkpoint.safe import load_torch_file
from benchbox.audit.subjects.checkpoint.stored import RankCheckpoint
from benchbox.errors import DataError, reason_of
from benchbox.observer.facts import SIXTEEN_BIT, OpaqueOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from benchbox.audit.subjects.checkpoint.stored import StoredArray

# Of transformers and accelerate, of peft, and of diffusers.
_MODELS = tuple(
    pattern
    for model, weights in (("model", "pytorch_model"), ("adapter_model", "adapter_model"), 2 * ("diffusion_pytorch_model",))
    for pattern in (f"{model}*.safetensors", f"{weights}*.bin")
)
_OPTIMIZERS = ("optimizer*.bin", "optimizer*.pt")
_UNKNOWN_CLASS = (
    "its class is unknown: it may round stochastically, or compensate rounding where the checkpoint does not show it; "
    "an audit of the training command shows the class"
)
_OBJECT = "; objects in it are not read, since that would run their code: save their state_dict()"
_RANK = re.compile(r"_rank(\d+)$")
METADATA = ".metadata"
# accelerate's save_state under FSDP puts the model and the optimizer into separate folders.
_PARTS = ("pytorch_model_fsdp_*", "optimizer_*")
_LEROBOT_STATE = "optimizer_state.safetensors"
_LEROBOT_GROUPS = "optimizer_param_groups.json"
# A safetensors file begins with the length of its header in 8 bytes, and the header is JSON.
_HEADER_START = 8


def read_file(path: Path) -> list[RankCheckpoint]:
    """Read a file of safetensors, or of `torch.save`: a model, an optimizer, or anything that contains both under any keys.

    Raises:
        DataError: the file contains neither.
    """
    if _is_safetensors(path):
        return [build_rank_checkpoint(merge_models({"": read_safetensors(path)}), [], in_order=False)]
    value = load_torch_file(path)
    model = collect_models(value)
    checkpoint = build_rank_checkpoint(model, [value], in_order=True)
    if not model and not checkpoint.stepped:
        values = (value, *value.values()) if isinstance(value, dict) else (value,)
        hint = _OBJECT if any(isinstance(item, PlaceholderObject) for item in values) else ""
        raise DataError(f"{path}: holds neither the tensors of a model nor the state of an optimizer{hint}")
    return [checkpoint]


def model_files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder, of one format, without averages.

    Where a model was saved in both formats, they are those of safetensors.
    """
    files = next((files for pattern in _MODELS if (files := sorted(folder.glob(pattern)))), [])
    return [path for path in files if not is_average(path.stem)] or files


def optimizer_files(folder: Path) -> list[Path]:
    return [path for pattern in _OPTIMIZERS for path in sorted(folder.glob(pattern))]


def read_folder(folder: Path) -> list[RankCheckpoint]:
    """Read weights and optimizers in separate files, as written by accelerate's `save_state`, transformers and benchbox.

    For FSDP, accelerate may write one file for each rank.

    Raises:
        DataError: a file is damaged, or a file of the model is missing.
    """
    models, optimizers = model_files(folder), optimizer_files(folder)
    ranks = sorted({_rank(path) for path in (*models, *optimizers)}, key=int)
    in_order = all(path.suffix == ".bin" for path in models)
    checkpoints = [
        build_rank_checkpoint(
            _read_model(folder, [path for path in models if _rank(path) == rank]),
            [load_torch_file(path) for path in optimizers if _rank(path) == rank],
            in_order=in_order,
        )
        for rank in ranks
    ]
    return [replace(checkpoint, rank=rank, world_size=len(checkpoints)) for rank, checkpoint in enumerate(checkpoints)]


def _rank(path: Path) -> str:
    match = _RANK.search(path.stem)
    return match[1] if match else "0"


def distributed_folders(folder: Path) -> list[Path]:
    """Return the folders that make up a distributed checkpoint: this one, or those that accelerate put into it."""
    if (folder / METADATA).is_file():
        return [folder]
    return [part for pattern in _PARTS for part in sorted(folder.glob(pattern)) if (part / METADATA).is_file()]


def lerobot_folder(folder: Path) -> Path | None:
    """Return LeRobot's `training_state` in or at this folder."""
    candidates = (folder, folder / "training_state")
    return next((path for path in candidates if (path / _LEROBOT_STATE).is_file() or _lerobot_parts(path)), None)


def read_lerobot(folder: Path) -> list[RankCheckpoint]:
    """Read LeRobot's `training_state`, and the `pretrained_model` beside it. Each of several optimizers has its own folder.

    The state is flat, `state/<number>/<name>`, in safetensors; the options are JSON
    (https://github.com/huggingface/lerobot, src/lerobot/optim/optimizers.py).
    """
    weights = folder.parent / "pretrained_model"
    optimizers = [_read_lerobot_optimizer(part) for part in _lerobot_parts(folder) or [folder]]
    return [build_rank_checkpoint(_read_model(weights, model_files(weights)), optimizers, in_order=False)]


def _lerobot_parts(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"*/{_LEROBOT_STATE}")) if folder.name == "training_state" else []


def _read_lerobot_optimizer(folder: Path) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in read_safetensors(folder / _LEROBOT_STATE).items():
        parts = key.split("/")
        if len(parts) != 3 or parts[0] != "state" or not parts[1].isdigit():
            raise DataError(f"{folder / _LEROBOT_STATE}: holds {key!r}; state of an optimizer is named state/<number>/<name>")
        state.setdefault(int(parts[1]), {})[parts[2]] = tensor
    optimizer = {"state": state, "param_groups": _load_json(folder / _LEROBOT_GROUPS)}
    if not is_optimizer_state(optimizer):
        raise DataError(f"{folder / _LEROBOT_GROUPS}: is no list of parameter groups")
    return optimizer


def build_rank_checkpoint(model: Mapping[str, StoredArray], saved_values: Iterable[Any], *, in_order: bool) -> RankCheckpoint:
    """Return the part of a checkpoint that one process saved.

    Args:
        model: its weights.
        saved_values: state dictionaries of optimizers, or values that contain them.
        in_order: whether the weights are in the order of the model.
    """
    optimizers = [
        (state_dict, read_parameter_states(state_dict, parent))
        for value in saved_values
        for state_dict, parent in _find_optimizers(value)
    ]
    linked = [link_weights(parameters, model, in_order=in_order) for _, parameters in optimizers]
    return RankCheckpoint(
        optimizer_chain=tuple(dict.fromkeys(optimizer_kind(parameters) for _, parameters in optimizers)),
        model=model,
        stepped=[tensor for stepped in linked for tensor in stepped],
        opaque=tuple(
            dict.fromkeys(
                OpaqueOptimizer(optimizer=optimizer_kind(parameters), reason=_UNKNOWN_CLASS)
                for (_, parameters), stepped in zip(optimizers, linked, strict=True)
                if not has_known_arithmetic(parameters)
                and any(tensor.dtype in SIXTEEN_BIT for tensor in stepped)
                and not all(parameter.compensation for parameter in parameters)
            )
        ),
        groups=[group for state_dict, _ in optimizers for group in weight_decay_groups(state_dict)],
    )


def _find_optimizers(value: object) -> Iterable[tuple[Mapping[str, Any], Mapping[Any, Any]]]:
    """Yield (optimizer, the dictionary that contains it): masters may be saved next to the optimizer."""
    mappings: dict[tuple[str, ...], Mapping[Any, Any]] = {}
    for path, mapping in walk_mappings(value):
        mappings[path] = mapping
        if is_optimizer_state(mapping):
            yield mapping, mappings.get(path[:-1], {}) if path else {}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, mapped from the file.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return dict(load_safetensors(path))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: damaged ({reason_of(error)})") from error


def _load_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error})") from error


def _read_model(folder: Path, files: Iterable[Path]) -> dict[str, StoredArray]:
    """Read the weights in all files: shards of one model if an index lists them, else one model in each file."""
    files = list(files)
    models = {path.stem: read_safetensors(path) if _is_safetensors(path) else load_torch_file(path) for path in files}
    names = {path.name for path in files}
    indexes = {path.name: _indexed_files(path) for path in sorted(folder.glob("*.index.json"))}
    if names:  # a model that was saved in two formats has an index of each
        indexes = {index: shards for index, shards in indexes.items() if names & shards}
    for index, shards in indexes.items():
        if missing := sorted(shards - names):
            raise DataError(f"{folder}: {index} names {', '.join(missing)}, which is not there")
    if indexes:
        models = {"": {name: tensor for model in models.values() for name, tensor in model.items()}}
    return merge_models(models)


def _indexed_files(path: Path) -> set[str]:
    """Return the names of the files that an index of shards lists."""
    index = _load_json(path)
    files = index.get("weight_map", {}) if isinstance(index, dict) else None
    if not isinstance(files, dict):
        raise DataError(f"{path}: is no index of weights: it has no weight_map")
    return {str(name) for name in files.values()}


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(_HEADER_START + 1)
    return path.suffix == ".safetensors" or start[_HEADER_START:] == b"{"
