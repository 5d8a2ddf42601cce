"""Checkpoints of one process: what `torch.save`, safetensors, accelerate, transformers, LeRobot and benchbox itself write."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors

from benchbox.audit.subjects.checkpoint.linking import link_weights
from benchbox.audit.subjects.checkpoint.optimizers import (
    weight_decay_groups,
    walk_mappings,
    is_optimizer_state,
    merge_models,
    optimizer_kind,
    collect_models,
    read_parameter_states,
)
from benchbox.audit.subjects.checkpoint.safe import load_file
from benchbox.audit.subjects.checkpoint.stored import RankCheckpoint
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from benchbox.audit.subjects.checkpoint.stored import StoredArray

_MODELS = ("model*.safetensors", "pytorch_model*.bin")
_OPTIMIZERS = ("optimizer*.bin", "optimizer*.pt")
_RANK = re.compile(r"_rank(\d+)$")
_LEROBOT_STATE = "optimizer_state.safetensors"
_LEROBOT_GROUPS = "optimizer_param_groups.json"
# A safetensors file begins with the length of its header, 8 bytes, and the header is JSON.
_HEADER_BEGINS = 8


def read_file(path: Path) -> list[RankCheckpoint]:
    """A file of safetensors, or of `torch.save`: a model, an optimizer, or anything that holds both under whatever keys.

    Raises:
        DataError: there is neither in it.
    """
    if _is_safetensors(path):
        return [build_rank_checkpoint(merge_models({"": read_safetensors(path)}), [], in_order=False)]
    value = load_file(path)
    model, optimizers = collect_models(value), [value]
    found = build_rank_checkpoint(model, optimizers, in_order=True)
    if not model and not found.stepped:
        raise DataError(f"{path}: holds neither the tensors of a model nor the state of an optimizer")
    return [found]


def model_files(folder: Path) -> list[Path]:
    """Files of weights in a folder, of one kind: where a model was saved twice, safetensors."""
    return next((files for pattern in _MODELS if (files := sorted(folder.glob(pattern)))), [])


def optimizer_files(folder: Path) -> list[Path]:
    return [path for pattern in _OPTIMIZERS for path in sorted(folder.glob(pattern))]


def read_folder(folder: Path) -> list[RankCheckpoint]:
    """Weights and optimizers in files of their own, as accelerate's `save_state`, transformers and benchbox leave them. Of FSDP
    accelerate may leave a file of each rank.

    Raises:
        DataError: a file is damaged, or not all files of the model are there.
    """
    models, optimizers = model_files(folder), optimizer_files(folder)
    ranks = sorted({_rank(path) for path in (*models, *optimizers)}, key=int)
    in_order = all(path.suffix == ".bin" for path in models)
    found = [
        build_rank_checkpoint(
            _model(folder, [path for path in models if _rank(path) == rank]),
            [load_file(path) for path in optimizers if _rank(path) == rank],
            in_order=in_order,
        )
        for rank in ranks
    ]
    return [replace(each, rank=rank, world_size=len(found)) for rank, each in enumerate(found)]


def _rank(path: Path) -> str:
    match = _RANK.search(path.stem)
    return match[1] if match else "0"


def lerobot_folder(folder: Path) -> Path | None:
    """LeRobot's `training_state` in or at this folder."""
    candidates = (folder, folder / "training_state")
    return next((each for each in candidates if (each / _LEROBOT_STATE).is_file() or _lerobot_parts(each)), None)


def read_lerobot(folder: Path) -> list[RankCheckpoint]:
    """LeRobot's `training_state`, and the `pretrained_model` beside it. Several optimizers have a folder each.

    The state is flat, `state/<number>/<name>`, in safetensors; the options are JSON
    (https://github.com/huggingface/lerobot, src/lerobot/optim/optimizers.py).
    """
    weights = folder.parent / "pretrained_model"
    optimizers = [_lerobot_optimizer(part) for part in _lerobot_parts(folder) or [folder]]
    return [build_rank_checkpoint(_model(weights, model_files(weights)), optimizers, in_order=False)]


def _lerobot_parts(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"*/{_LEROBOT_STATE}")) if folder.name == "training_state" else []


def _lerobot_optimizer(folder: Path) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in read_safetensors(folder / _LEROBOT_STATE).items():
        parts = key.split("/")
        if len(parts) != 3 or parts[0] != "state" or not parts[1].isdigit():
            raise DataError(f"{folder / _LEROBOT_STATE}: holds {key!r}; state of an optimizer is named state/<number>/<name>")
        state.setdefault(int(parts[1]), {})[parts[2]] = value
    optimizer = {"state": state, "param_groups": _read_json(folder / _LEROBOT_GROUPS)}
    if not is_optimizer_state(optimizer):
        raise DataError(f"{folder / _LEROBOT_GROUPS}: is no list of parameter groups")
    return optimizer


def build_rank_checkpoint(model: Mapping[str, StoredArray], optimizers: Iterable[Any], *, in_order: bool) -> RankCheckpoint:
    """What one process saved; `optimizers` are state dictionaries, or anything they lie in."""
    found = [(each, read_parameter_states(each, beside)) for value in optimizers for each, beside in _optimizers(value)]
    return RankCheckpoint(
        optimizer_chain=tuple(dict.fromkeys(optimizer_kind(each) for _, each in found)),
        model=model,
        stepped=[tensor for _, each in found for tensor in link_weights(each, model, in_order=in_order)],
        groups=[group for each, _ in found for group in weight_decay_groups(each)],
    )


def _optimizers(value: object) -> Iterable[tuple[Mapping[str, Any], Mapping[Any, Any]]]:
    """(optimizer, the dictionary that it lies in): masters may lie beside it."""
    around: dict[tuple[str, ...], Mapping[Any, Any]] = {}
    for path, each in walk_mappings(value):
        around[path] = each
        if is_optimizer_state(each):
            yield each, around.get(path[:-1], {}) if path else {}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return dict(load_safetensors(path))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: damaged ({str(error).splitlines()[0]})") from error


def _read_json(path: Path) -> Any:
    """Raises:
    DataError: there is no such file, or it is damaged.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error})") from error


def _model(folder: Path, files: Iterable[Path]) -> dict[str, StoredArray]:
    """Of all files: the parts of one model where an index says so, else models of their own."""
    files = list(files)
    indexes = sorted(folder.glob("*.index.json"))
    models = {path.stem: read_safetensors(path) if _is_safetensors(path) else load_file(path) for path in files}
    for index in indexes:
        named = set(_read_json(index).get("weight_map", {}).values())
        if missing := sorted(named - {path.name for path in files}):
            raise DataError(f"{folder}: {index.name} names {', '.join(missing)}, which is not there")
    if indexes:
        models = {"": {name: value for model in models.values() for name, value in model.items()}}
    return merge_models(models)


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(_HEADER_BEGINS + 1)
    return path.suffix == ".safetensors" or start[_HEADER_BEGINS:] == b"{"
