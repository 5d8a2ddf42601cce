"""The checkpoints of a training: when they are saved, and how a session is restored from one."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from benchbox.backends.state import STATE, WEIGHTS
from benchbox.data.samples.digest import check_unchanged
from benchbox.dcp.files import TensorFolder
from benchbox.errors import DataError, UnsupportedError
from benchbox.registry.phases import CHECKPOINT_LIMIT_S
from benchbox.store.checkpoints import (
    REMEDY,
    TENSORS,
    TRAINER,
    CheckpointManifest,
    checkpoint_name,
    configuration_changes,
    damage_of,
    read_manifest,
)
from benchbox.store.files import read_json
from benchbox.trainer.checkpoint.generators import set_generators
from benchbox.trainer.checkpoint.owners import PartOwners
from benchbox.trainer.checkpoint.state import (
    drawn_on,
    generator_keys,
    generator_states,
    restore_document,
    session_state,
    trainer_document,
    world_size,
)
from benchbox.trainer.checkpoint.writing import BackgroundTask, CheckpointContents, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from benchbox.data.samples.digest import DatasetDigest
    from benchbox.session import Session
    from benchbox.spec.cell import Cell
    from benchbox.spec.train import CheckpointSection

_LEAVE_LIMIT_S = 60.0  # to wait for a checkpoint after the training has failed


class CheckpointManager:
    """Saves and restores sessions of one cell. As a context manager it waits for the last save, also after an error.

    Args:
        section: how often they are saved, and how many are kept.
        config: the training configuration, for the manifest.
        waiting: entered while the training waits for files.
        data: digests of the datasets, for the manifest and to compare with those of a checkpoint that is restored; None if they
            are not known.
    """

    def __init__(
        self,
        folder: Path,
        cell: Cell,
        section: CheckpointSection,
        config: Mapping[str, Any] | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        data: Sequence[DatasetDigest] | None = None,
    ) -> None:
        self._folder = folder
        self._data = None if data is None else [dict(digest) for digest in data]
        self._waiting = waiting
        self._cell = cell
        self._section = section
        self._config = config
        self._task: BackgroundTask | None = None
        self._group: dist.ProcessGroup | None = None
        self._owners = PartOwners()
        self._warnings: deque[str] = deque()  # appended to by the thread that writes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
        elif self._task is not None:
            with suppress(Exception):
                self._task.join(_LEAVE_LIMIT_S)

    def is_due(self, completed: int, *, last: bool) -> bool:
        """Return whether a checkpoint is saved after `completed` steps, of which the `last` is always saved.

        Raises:
            CheckpointError: the save that runs in the background has failed.
        """
        if self._task is not None and self._task.has_failed:
            self.close()
        return last or completed % self._section.every == 0

    def save(self, session: Session, steps: int, *, score: float | None = None) -> Path:
        """Save the state after `steps` steps. All ranks must call it.

        With `background` it returns when the state is copied to host memory, and a thread writes the copy; the one before it is
        waited for first. Otherwise it returns when the checkpoint is on disk.

        Args:
            score: the value of the metric that `keep_best` compares, lower is better; None where it was not computed.

        Raises:
            CheckpointError: this checkpoint, or the one before it, could not be written.
            UnsupportedError: the backend cannot be saved.
        """
        self.close()
        state = session_state(session)
        tensors = state.tensors(with_frozen=not self._section.trainable_only) | generator_states(session.device)
        if self._group is None and dist.is_initialized():
            # Of its own, because a thread must not mix its collectives with those of the step; on hosts, as files are.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=CHECKPOINT_LIMIT_S))
        if self._section.background:
            owned_parts = self._owners.owned(tensors, self._group)
            tensors = {key: shards.copied_to_host() for key, shards in owned_parts.items()}
        contents = CheckpointContents(
            tensors=tensors, trainer=trainer_document(session, state), manifest=self._manifest(session, steps, score)
        )

        def write() -> None:
            best = self._section.keep_best
            count = 0 if best is None else best.count
            keep = self._section.keep
            write_checkpoint(self._folder, contents, self._group, keep=keep, keep_best=count, warn=self._warnings.append)

        if self._section.background:
            self._task = BackgroundTask(write)
        else:
            with self._waiting():
                write()
        return self._folder / checkpoint_name(steps)

    def close(self) -> None:
        """Wait for the save that runs in the background.

        Raises:
            CheckpointError: it could not be written.
        """
        task, self._task = self._task, None
        if task is not None:
            with self._waiting():
                task.join()

    def take_warnings(self) -> list[str]:
        """Return lines about what failed since the last call although a checkpoint was saved; on rank 0 only."""
        return [self._warnings.popleft() for _ in range(len(self._warnings))]

    def _manifest(self, session: Session, steps: int, score: float | None) -> CheckpointManifest:
        backend = session.backend
        return CheckpointManifest(
            steps=steps,
            samples=steps * self._cell.samples_per_step,
            cell=self._cell.to_dict(),
            config=None if self._config is None else dict(self._config),
            topology={"backend": backend.name, "world_size": world_size(), "mesh": backend.mesh()},
            recipe=self._cell.recipe,
            trainable_only=self._section.trainable_only,
            score=score,
            files={},
            versions={"python": sys.version.split()[0], "torch": torch.__version__},
            data=self._data,
        )

    def check_data(self, checkpoint: Path) -> None:
        """Check that the datasets are those that a checkpoint was trained on: others would be drawn and divided otherwise.

        Raises:
            ConfigurationError: one of them has changed, naming what differs.
        """
        hint = "resume with the data that it was trained on, or name another folder by --out for a new training"
        if self._data is not None:
            check_unchanged(checkpoint, read_manifest(checkpoint).data, self._data, hint)

    def restore(self, session: Session, checkpoint: Path) -> None:
        """Load a checkpoint, of any backend and number of ranks, into a freshly built session. All ranks must call it.

        Files are read into the live tensors one tensor after another: the device never holds a second copy of weights, masters
        or moments.

        Raises:
            ConfigurationError: the checkpoint belongs to another configuration or other data.
            UnsupportedError: frozen weights that the checkpoint leaves out were drawn on another kind of device.
            DataError: the checkpoint is damaged. Nothing in the session has changed if a file is missing or cut off.
        """
        configuration_changes(checkpoint, self._cell)
        self.check_data(checkpoint)
        if (damage := damage_of(checkpoint, contents=False)) is not None:
            raise DataError(f"{checkpoint}: damaged checkpoint ({damage}); remove it to resume from the previous one")
        with_frozen = not read_manifest(checkpoint).trainable_only
        backend, folder, trainer = session.backend, TensorFolder(checkpoint / TENSORS), read_json(checkpoint / TRAINER, REMEDY)
        entries = trainer["parameters"]
        with torch.no_grad():
            backend.create_optimizer_state(
                {key.removeprefix(STATE).partition("/")[2] for key in folder.layout if key.startswith(STATE)}
                | {name for name, entry in entries.items() if entry["numbers"]}
            )
            state = session_state(session)
            if not with_frozen and self._cell.weights is None:
                _check_frozen(checkpoint, state.tensors(with_frozen=True), folder.layout, session.device.type)
            tensors = state.tensors(with_frozen=with_frozen)
            _check_names(checkpoint, tensors, folder.layout)
            folder.read_into(tensors)
            state.set_numbers(entries)
            backend.refresh_live()
        restore_document(session, trainer)
        keys = generator_keys(folder.layout, session.device)
        states = folder.read(keys.values())
        set_generators({kind: states[key] for kind, key in keys.items()}, session.device)


def _check_frozen(checkpoint: Path, tensors: Collection[str], saved: Mapping[str, Any], device: str) -> None:
    """Raise UnsupportedError if weights of the session were not saved, and were drawn on another kind of device."""
    is_complete = all(key in saved for key in tensors if key.startswith(WEIGHTS))
    if not is_complete and (there := drawn_on(saved)) != device:
        message = f"its frozen weights were drawn on {there}, are not in it, and are others on {device}"
        raise UnsupportedError(f"{checkpoint}: {message}; train with checkpoint.trainable_only: false, or from weights")


def _check_names(checkpoint: Path, tensors: Collection[str], saved: Collection[str]) -> None:
    """Raise DataError if the session has a tensor that was not saved: the reverse is a part of another rank."""
    if missing := [key for key in tensors if key not in saved]:
        kind = "optimizer state" if missing[0].startswith(STATE) else "weight" if missing[0].startswith(WEIGHTS) else "tensor"
        raise DataError(f"{checkpoint}: has no {kind} {missing[0].rpartition('/')[2]}, and {len(missing) - 1} more are missing")
