"""Checkpoints of one process: what `torch.save`, safetensors, accelerate, transformers, LeRobot and benchbox itself write."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors

from benchbox.audit.subjects.checkpoint.linking import stepped_by
from benchbox.audit.subjects.checkpoint.optimizers import groups_of, inside, is_optimizer, joined, kind_of, models_in, saved
from benchbox.audit.subjects.checkpoint.safe import load_file
from benchbox.audit.subjects.checkpoint.stored import Stored
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from benchbox.audit.subjects.checkpoint.stored import Held

_MODELS = ("model*.safetensors", "pytorch_model*.bin")
_OPTIMIZERS = ("optimizer*.bin", "optimizer*.pt")
_RANK = re.compile(r"_rank(\d+)$")
_LEROBOT_STATE = "optimizer_state.safetensors"
_LEROBOT_GROUPS = "optimizer_param_groups.json"
# A safetensors file begins with the length of its header, 8 bytes, and the header is JSON.
_HEADER_BEGINS = 8


def read_file(path: Path) -> list[Stored]:
    """A file of safetensors, or of `torch.save`: a model, an optimizer, or anything that holds both under whatever keys.

    Raises:
        DataError: there is neither in it.
    """
    if _is_safetensors(path):
        return [stored(joined({"": read_safetensors(path)}), [], in_order=False)]
    value = load_file(path)
    model, optimizers = models_in(value), [value]
    found = stored(model, optimizers, in_order=True)
    if not model and not found.stepped:
        raise DataError(f"{path}: holds neither the tensors of a model nor the state of an optimizer")
    return [found]


def model_files(folder: Path) -> list[Path]:
    """Files of weights in a folder, of one kind: where a model was saved twice, safetensors."""
    return next((files for pattern in _MODELS if (files := sorted(folder.glob(pattern)))), [])


def optimizer_files(folder: Path) -> list[Path]:
    return [path for pattern in _OPTIMIZERS for path in sorted(folder.glob(pattern))]


def read_folder(folder: Path) -> list[Stored]:
    """Weights and optimizers in files of their own, as accelerate's `save_state`, transformers and benchbox leave them. Of FSDP
    accelerate may leave a file of each rank.

    Raises:
        DataError: a file is damaged, or not all files of the model are there.
    """
    models, optimizers = model_files(folder), optimizer_files(folder)
    ranks = sorted({_rank(path) for path in (*models, *optimizers)}, key=int)
    in_order = all(path.suffix == ".bin" for path in models)
    found = [
        stored(
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


def read_lerobot(folder: Path) -> list[Stored]:
    """LeRobot's `training_state`, and the `pretrained_model` beside it. Several optimizers have a folder each.

    The state is flat, `state/<number>/<name>`, in safetensors; the options are JSON
    (https://github.com/huggingface/lerobot, src/lerobot/optim/optimizers.py).
    """
    weights = folder.parent / "pretrained_model"
    optimizers = [_lerobot_optimizer(part) for part in _lerobot_parts(folder) or [folder]]
    return [stored(_model(weights, model_files(weights)), optimizers, in_order=False)]


def _lerobot_parts(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"*/{_LEROBOT_STATE}")) if folder.name == "training_state" else []


def _lerobot_optimizer(folder: Path) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in read_safetensors(folder / _LEROBOT_STATE).items():
        parts = key.split("/")
        if len(parts) != 3 or parts[0] != "state" or not parts[1].isdigit():
            raise DataError(f"{folder / _LEROBOT_STATE}: holds {key!r}; state of an optimizer is named state/<number>/<name>")
        state.setdefault(int(parts[1]), {})[parts[2]] = value
    optimizer = {"state": state, "param_groups": read_json(folder / _LEROBOT_GROUPS)}
    if not is_optimizer(optimizer):
        raise DataError(f"{folder / _LEROBOT_GROUPS}: is no list of parameter groups")
    return optimizer


def stored(model: Mapping[str, Held], optimizers: Iterable[Any], *, in_order: bool) -> Stored:
    """What one process saved; `optimizers` are state dictionaries, or anything they lie in."""
    found = [(each, saved(each, beside)) for value in optimizers for each, beside in _optimizers(value)]
    return Stored(
        optimizer_chain=tuple(dict.fromkeys(kind_of(each) for _, each in found)),
        model=model,
        stepped=[tensor for _, each in found for tensor in stepped_by(each, model, in_order=in_order)],
        groups=[group for each, _ in found for group in groups_of(each)],
    )


def _optimizers(value: object) -> Iterable[tuple[Mapping[str, Any], Mapping[Any, Any]]]:
    """(optimizer, the dictionary that it lies in): masters may lie beside it."""
    around: dict[tuple[str, ...], Mapping[Any, Any]] = {}
    for path, each in inside(value):
        around[path] = each
        if is_optimizer(each):
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


def read_json(path: Path) -> Any:
    """Raises:
    DataError: there is no such file, or it is damaged.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error})") from error


def _model(folder: Path, files: Iterable[Path]) -> dict[str, Held]:
    """Of all files: the parts of one model where an index says so, else models of their own."""
    files = list(files)
    indexes = sorted(folder.glob("*.index.json"))
    models = {path.stem: read_safetensors(path) if _is_safetensors(path) else load_file(path) for path in files}
    for index in indexes:
        named = set(read_json(index).get("weight_map", {}).values())
        if missing := sorted(named - {path.name for path in files}):
            raise DataError(f"{folder}: {index.name} names {', '.join(missing)}, which is not there")
    if indexes:
        models = {"": {name: value for model in models.values() for name, value in model.items()}}
    return joined(models)


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(_HEADER_BEGINS + 1)
    return path.suffix == ".safetensors" or start[_HEADER_BEGINS:] == b"{"
