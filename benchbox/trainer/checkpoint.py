"""Checkpoints: the complete state that a run needs to continue bit for bit.

A checkpoint is a folder `step-<n>`: `model.safetensors` (the weights by parameter name, in the dtype of the training),
`optimizer.pt` (moments and masters), `schedule.pt`, `rng-rank<r>.pt`, and `checkpoint.json`, its description. The folder
appears under its name only when all files are on disk.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from benchbox.errors import DataError
from benchbox.optim import MasterWeightOptimizer
from benchbox.store.checkpoints import (
    check_same_configuration,
    checkpoint_name,
    remove_old_checkpoints,
    write_description,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from benchbox.session import Session
    from benchbox.spec.cell import Cell


class CheckpointManager:
    """Saves and restores sessions of one cell with a backend that replicates the complete state on every rank.

    Args:
        interval: steps between two checkpoints.
        keep: number of checkpoints to keep; older ones are removed.
    """

    def __init__(self, folder: Path, cell: Cell, *, interval: int, keep: int) -> None:
        self.interval = interval
        self._folder = folder
        self._cell = cell
        self._keep = keep

    def save(self, session: Session, steps: int) -> Path:
        """Save the state after `steps` steps. All ranks must call it; it returns when the checkpoint is on disk."""
        final = self._folder / checkpoint_name(steps)
        partial = self._folder / f".partial-{final.name}"
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _barrier()
        torch.save(_rng_state(session.device), partial / f"rng-rank{_rank()}.pt")
        if _rank() == 0:
            prepared = session.backend.prepared
            tensors = {name: tensor.detach().contiguous() for name, tensor in _unwrap(session.model).state_dict().items()}
            save_file(tensors, partial / "model.safetensors")
            torch.save(prepared.stepping.state_dict(), partial / "optimizer.pt")
            torch.save(prepared.schedule.state_dict(), partial / "schedule.pt")
            write_description(partial, self._cell, steps)
        _barrier()
        if _rank() == 0:
            _sync_to_disk(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            remove_old_checkpoints(self._folder, self._keep)
        _barrier()
        return final

    def restore(self, session: Session, checkpoint: Path) -> None:
        """Load a checkpoint into a freshly built session.

        The files are mapped, and copied into the live tensors one tensor after another: the device never holds a second copy
        of weights, masters or moments.

        Raises:
            ConfigurationError: the checkpoint belongs to another configuration.
            DataError: the checkpoint is damaged.
        """
        check_same_configuration(checkpoint, self._cell)
        device = session.device
        prepared = session.backend.prepared
        # Any other optimizer keeps tensors that are on its device already, and must not train on a mapped file.
        mapped = isinstance(prepared.stepping, MasterWeightOptimizer) or device.type != "cpu"
        try:
            weights = _map_weights(checkpoint / "model.safetensors")
            optimizer = _load_state(checkpoint / "optimizer.pt", mapped=mapped)
            schedule = _load_state(checkpoint / "schedule.pt")
            rng_state = _load_state(checkpoint / f"rng-rank{_rank()}.pt")
        except Exception as error:
            raise DataError(f"{checkpoint}: damaged checkpoint ({error}); remove it to resume from the previous one") from error
        _unwrap(session.model).load_state_dict(weights)
        prepared.stepping.load_state_dict(optimizer)
        prepared.schedule.load_state_dict(schedule)
        torch.set_rng_state(rng_state["cpu"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(rng_state["cuda"], device)


def _unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _load_state(path: Path, *, mapped: bool = False) -> Any:
    """Load what `torch.save` wrote into host memory, or map it: its tensors are then read when they are used."""
    return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)


def _map_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, mapped: they are read when they are used."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def _sync_to_disk(folder: Path) -> None:
    """Flush the files before the folder is renamed: a rename may reach the disk before the contents of the folder."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
