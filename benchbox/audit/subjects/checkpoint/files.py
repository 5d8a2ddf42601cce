"""Checkpoints of one process: what `torch.save`, safetensors, accelerate, LeRobot and benchbox itself write."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors

from benchbox.audit.subjects.checkpoint.optimizers import is_model, is_optimizer, stepped_by
from benchbox.audit.subjects.checkpoint.safe import load_file
from benchbox.audit.subjects.checkpoint.stored import Stored
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

_MODELS = ("model.safetensors", "pytorch_model.bin")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_LEROBOT_STATE = "optimizer_state.safetensors"
_LEROBOT_GROUPS = "optimizer_param_groups.json"


def read_torch_file(path: Path) -> list[Stored]:
    """A file of `torch.save`: a model, an optimizer, or a dictionary that holds both under whatever names.

    Raises:
        DataError: there is neither in it.
    """
    held = load_file(path)
    model: dict[str, Tensor] = {}
    optimizers: list[Mapping[str, Any]] = []
    for value in _inside(held):
        if is_optimizer(value):
            optimizers.append(value)
        elif is_model(value) and len(value) > len(model):
            model = value
    if not model and not optimizers:
        raise DataError(f"{path}: holds neither the tensors of a model nor the state of an optimizer")
    return [_stored(model, optimizers)]


def _inside(held: Any, depth: int = 3) -> Iterator[Any]:
    """The value and the dictionaries in it; an optimizer's state is not gone into."""
    yield held
    if isinstance(held, dict) and depth and not is_optimizer(held):
        for value in held.values():
            if isinstance(value, dict):
                yield from _inside(value, depth - 1)
            elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
                for each in value:
                    yield from _inside(each, depth - 1)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return dict(load_safetensors(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path}: damaged ({str(error).splitlines()[0]})") from error


def is_state_folder(folder: Path) -> bool:
    """Whether accelerate's `save_state` or benchbox wrote this folder."""
    return any((folder / name).is_file() for name in (*_MODELS, *_OPTIMIZERS))


def read_state_folder(folder: Path) -> list[Stored]:
    """A folder with a model file and an optimizer file beside it."""
    models = [folder / name for name in _MODELS if (folder / name).is_file()]
    optimizers = [
        path for path in sorted(folder.iterdir()) if path.name.startswith("optimizer") and path.name.endswith((".pt", ".bin"))
    ]
    model: dict[str, Tensor] = {}
    if models:
        model = read_safetensors(models[0]) if models[0].suffix == ".safetensors" else _model_of(models[0])
    return [_stored(model, [state for path in optimizers if is_optimizer(state := load_file(path))])]


def is_lerobot(folder: Path) -> bool:
    return (folder / _LEROBOT_STATE).is_file()


def read_lerobot(folder: Path) -> list[Stored]:
    """LeRobot's `training_state`, and the `pretrained_model` beside it.

    State tensors are flat under `state/<number>/<name>`, options in JSON.
    """
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in read_safetensors(folder / _LEROBOT_STATE).items():
        parts = key.split("/")
        if len(parts) == 3 and parts[0] == "state" and parts[1].isdigit():
            state.setdefault(int(parts[1]), {})[parts[2]] = value
    groups_file = folder / _LEROBOT_GROUPS
    try:
        groups = json.loads(groups_file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{groups_file}: cannot be read as JSON ({error})") from error
    model_file = folder.parent / "pretrained_model" / "model.safetensors"
    model = read_safetensors(model_file) if model_file.is_file() else {}
    return [_stored(model, [{"state": state, "param_groups": groups}])]


def read_model(path: Path) -> list[Stored]:
    """Weights alone."""
    return [_stored(read_safetensors(path), [])]


def _model_of(path: Path) -> dict[str, Tensor]:
    held = load_file(path)
    if not is_model(held):
        raise DataError(f"{path}: does not hold the tensors of a model")
    return dict(held)


def _stored(model: Mapping[str, Tensor], optimizers: list[Mapping[str, Any]]) -> Stored:
    stepped = [tensor for optimizer in optimizers for tensor in stepped_by(optimizer, model)]
    return Stored(rank=0, world_size=1, optimizer="saved optimizer", model=model, stepped=stepped)
