"""DeepSpeed's checkpoints without partitions: of stage 0, and universal ones, with a folder for each parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchbox.audit.subjects.checkpoint.files import build_rank_checkpoint
from benchbox.audit.subjects.checkpoint.optimizers import merge_models, read_step_count
from benchbox.audit.subjects.checkpoint.safe import load_torch_file
from benchbox.audit.subjects.checkpoint.stored import ElementRange, RankCheckpoint, StoredSteppedTensor, describe_tensor
from benchbox.audit.subjects.checkpoint.zero import buffer_names, read_model_file, zero_model_files
from benchbox.errors import DataError
from benchbox.observer.introspect.names import unwrapped_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from benchbox.audit.subjects.checkpoint.stored import StoredArray

_UNIVERSAL = "zero"
_MASTER = "fp32"


def read_unpartitioned(folder: Path) -> list[RankCheckpoint]:
    """Read each model-parallel rank of a checkpoint in which no optimizer file is that of a data-parallel rank.

    Raises:
        DataError: a file is damaged or missing.
    """
    paths = [path for _, path in sorted(zero_model_files(folder).items())]
    checkpoints = []
    for path in paths:
        value = read_model_file(path)
        buffers, model = buffer_names(value), merge_models({"": value["module"]})
        if (folder / _UNIVERSAL).is_dir():
            checkpoint = RankCheckpoint(model=model, stepped=_read_universal(folder / _UNIVERSAL, model, buffers or ()))
        elif value.get("optimizer") is not None:
            parameters = {name: array for name, array in model.items() if name not in (buffers or ())}
            checkpoint = build_rank_checkpoint(parameters, [value["optimizer"]], in_order=True)
        else:
            raise DataError(f"{folder}: holds no *_optim_states.pt of its ranks, nor an optimizer in {path.name}")
        checkpoints.append(replace(checkpoint, model=model, buffers=buffers))
    return [replace(checkpoint, rank=rank, world_size=len(paths)) for rank, checkpoint in enumerate(checkpoints)]


def _read_universal(folder: Path, model: Mapping[str, StoredArray], buffers: Collection[str]) -> list[StoredSteppedTensor]:
    """Read master and state of every parameter of a model, or of a pipeline's stage; there are no options of an optimizer."""
    stepped = []
    for parameter in sorted(path for path in folder.iterdir() if path.is_dir()):
        name = unwrapped_name(parameter.name)
        if name not in model or name in buffers:
            continue
        values = {path.stem: _read_value(path) for path in sorted(parameter.glob("*.pt"))}
        if not isinstance(values.get(_MASTER), Tensor):
            raise DataError(f"{parameter}: holds no {_MASTER}.pt with the master of a parameter")
        arrays = {name: describe_tensor(value) for name, value in values.items() if isinstance(value, Tensor)}
        master, live = arrays.pop(_MASTER), model[name]
        stepped.append(
            StoredSteppedTensor(
                name=name,
                optimizer="optimizer",
                dtype=master.dtype,
                weight=master,
                state=arrays,
                options={},
                step_count=read_step_count(values.get("step")),
                is_master=True,
                live=ElementRange(array=live, start=0, stop=live.elements) if live.elements else None,
                live_dtype=live.dtype,
                ndim=master.ndim,
            )
        )
    return stepped


def _read_value(path: Path) -> Any:
    value = load_torch_file(path)
    return value.get("param") if isinstance(value, dict) else value
