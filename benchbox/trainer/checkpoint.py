"""Checkpoints: everything a run needs to continue bit for bit, written whole or not at all.

A checkpoint is a folder `step-<n>`: `model.safetensors` (the policy under its own names, as trained), `optimizer.pt` (moments
and masters), `schedule.pt`, `rng-rank<r>.pt`, and `checkpoint.json`, which says what it is. The folder appears under its name
only when all of it is on disk.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

from benchbox.errors import DataError
from benchbox.store.checkpoints import check_same, describe_in, keep_newest, name_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from benchbox.session import Session
    from benchbox.spec.cell import Cell


class Checkpoints:
    """Saves and restores sessions of one cell, whose backend holds everything on every rank."""

    def __init__(self, folder: Path, cell: Cell, *, every: int, keep: int) -> None:
        self.every = every
        self._folder = folder
        self._cell = cell
        self._keep = keep

    def save(self, session: Session, steps: int) -> Path:
        """Save what `steps` steps have made. Called on every rank; returns when the checkpoint is on disk."""
        final = self._folder / name_of(steps)
        partial = self._folder / f".partial-{final.name}"
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _barrier()
        torch.save(_random_state(session.device), partial / f"rng-rank{_rank()}.pt")
        if _rank() == 0:
            prepared = session.backend.prepared
            tensors = {name: tensor.detach().contiguous() for name, tensor in _policy(session.model).state_dict().items()}
            save_file(tensors, partial / "model.safetensors")
            torch.save(prepared.stepping.state_dict(), partial / "optimizer.pt")
            torch.save(prepared.schedule.state_dict(), partial / "schedule.pt")
            describe_in(partial, self._cell, steps)
        _barrier()
        if _rank() == 0:
            _to_disk(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            keep_newest(self._folder, self._keep)
        _barrier()
        return final

    def restore(self, session: Session, checkpoint: Path) -> None:
        """Load a checkpoint into a freshly built session.

        Raises:
            ConfigurationError: it is of another configuration.
            DataError: it is damaged.
        """
        check_same(checkpoint, self._cell)
        device = session.device
        prepared = session.backend.prepared
        try:
            weights = load_file(checkpoint / "model.safetensors", device=str(device))
            optimizer = _load(checkpoint / "optimizer.pt", device)
            schedule = _load(checkpoint / "schedule.pt", device)
            random = _load(checkpoint / f"rng-rank{_rank()}.pt", torch.device("cpu"))
        except Exception as error:
            raise DataError(f"{checkpoint}: damaged checkpoint ({error}); remove it to resume from the one before") from error
        _policy(session.model).load_state_dict(weights)
        prepared.stepping.load_state_dict(optimizer)
        prepared.schedule.load_state_dict(schedule)
        torch.set_rng_state(random["cpu"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], device)


def _policy(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _load(path: Path, device: torch.device) -> Any:
    return torch.load(path, map_location=device, weights_only=True)


def _to_disk(folder: Path) -> None:
    """Make the files durable before the folder gets its name: a rename may reach the disk before what it names."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
