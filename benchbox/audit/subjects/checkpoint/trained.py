"""Checkpoints that `benchbox train` wrote, of any backend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchbox.audit.subjects.checkpoint.optimizers import ParameterState, optimizer_kind
from benchbox.audit.subjects.checkpoint.stored import RankCheckpoint, StoredArray, StoredSteppedTensor
from benchbox.errors import DataError
from benchbox.registry.recipes import recipes
from benchbox.store.checkpoints import REMEDY, TENSORS, TRAINER, damage_of, find_checkpoint, read_manifest
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from benchbox.dcp.files import TensorFolder

# Backends that step the parameters themselves, and round them where they are gathered.
_WITHOUT_MASTERS = ("fsdp1", "fsdp2", "hsdp")


def trained_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that a folder is, or the newest one of the training that it is the folder of; None for another."""
    try:
        return find_checkpoint(folder)
    except DataError:
        return None


def read_trained(folder: Path) -> list[RankCheckpoint]:
    """Read weights and optimizer state as of one rank: they are full tensors, however the backend shards them.

    Raises:
        DataError: a file is damaged or missing.
    """
    from benchbox.dcp.files import TensorFolder  # imports much of torch

    if (damage := damage_of(folder)) is not None:
        raise DataError(f"{folder}: damaged checkpoint ({damage})")
    manifest, trainer = read_manifest(folder), read_json(folder / TRAINER, REMEDY)
    tensors = TensorFolder(folder / TENSORS)
    arrays: dict[str, dict[str, StoredArray]] = {"weights": {}, "buffers": {}}  # by kind, and the name of the parameter
    for key in tensors.layout:
        kind, _, name = key.removeprefix("state/").partition("/")
        arrays.setdefault(kind, {})[name] = _describe(tensors, key)
    groups = trainer["groups"]
    parameters = [
        ParameterState(
            key=name,
            group=entry["group"],
            options=groups[entry["group"]],
            state={kind: arrays[kind][name] for kind in _state_kinds(tensors) if name in arrays[kind]},
            step_count=entry["numbers"].get("step"),
            name=name,
        )
        for name, entry in trainer["parameters"].items()
    ]
    recipe, backend = recipes().get(manifest.recipe), str(manifest.topology["backend"])
    rounded_to = recipe.storage if recipe is not None and recipe.masters and not backend.startswith(_WITHOUT_MASTERS) else None
    kind = optimizer_kind(parameters)
    counts = [sum(parameter.group == number for parameter in parameters) for number in range(len(groups))]
    return [
        RankCheckpoint(
            optimizer_chain=(kind,),
            model=_live_weights(arrays["weights"], trainer["parameters"], rounded_to) | arrays["buffers"],
            stepped=[
                replace(
                    _stepped_tensor(parameter, arrays["weights"], kind, rounded_to), compensation=trainer.get("compensation")
                )
                for parameter in parameters
            ],
            groups=[(float(group.get("weight_decay") or 0.0), count) for group, count in zip(groups, counts, strict=True)],
            buffers=frozenset(arrays["buffers"]),
        )
    ]


def _state_kinds(tensors: TensorFolder) -> list[str]:
    return list(dict.fromkeys(key.split("/")[1] for key in tensors.layout if key.startswith("state/")))


def _describe(tensors: TensorFolder, key: str) -> StoredArray:
    entry = tensors.layout[key]
    dtype = entry.properties.dtype
    return StoredArray(
        dtype=str(dtype).removeprefix("torch."),
        shape=tuple(entry.size),
        ndim=len(entry.size),
        element_bytes=torch.empty(0, dtype=dtype).element_size(),
        read=lambda: tensors.read([key])[key],
    )


def _live_weights(
    weights: Mapping[str, StoredArray], trained: Mapping[str, Any], rounded_to: str | None
) -> dict[str, StoredArray]:
    """Return the weights that were stored as they are: a weight that was rounded from its master is not in the checkpoint."""
    return {name: array for name, array in weights.items() if rounded_to is None or name not in trained}


def _stepped_tensor(
    parameter: ParameterState, weights: Mapping[str, StoredArray], kind: str, rounded_to: str | None
) -> StoredSteppedTensor:
    name = str(parameter.name)
    weight = weights[name]
    return StoredSteppedTensor(
        name=name,
        optimizer=kind,
        dtype=weight.dtype,
        weight=weight,
        state=parameter.state,
        options=parameter.options,
        step_count=parameter.step_count,
        is_master=rounded_to is not None,
        live_dtype=rounded_to or weight.dtype,
        ndim=weight.ndim,
    )
