"""Writing a checkpoint: all ranks together, at once or in a thread beside the training."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from benchbox.dcp.files import METADATA, describe_failure, write_shards
from benchbox.errors import CheckpointError
from benchbox.store.checkpoints import (
    TENSORS,
    TRAINER,
    CheckpointManifest,
    begin_checkpoint,
    describe_files,
    partial_folder,
    publish_checkpoint,
    remove_old_checkpoints,
)
from benchbox.store.files import write_json
from benchbox.trainer.checkpoint.state import rank

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchbox.dcp.shards import Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """Contents that one rank writes: its tensors, and the documents, of which rank 0 writes those of all ranks."""

    tensors: dict[str, Shards]
    trainer: dict[str, Any]
    manifest: CheckpointManifest


def write_checkpoint(
    folder: Path,
    contents: CheckpointContents,
    group: dist.ProcessGroup | None,
    *,
    keep: int,
    keep_best: int,
    warn: Callable[[str], object],
) -> None:
    """Write a checkpoint under another name, flush it, and rename it. All ranks of the group must call it.

    Args:
        keep, keep_best: see `remove_old_checkpoints`.
        warn: called on rank 0 with a line about each thing that failed when the checkpoint was complete: its link, or the
            removal of older ones.

    Raises:
        CheckpointError: on every rank, if it cannot be written on one of them.
    """
    steps = contents.manifest.steps
    partial = partial_folder(folder, steps)

    def describe_own() -> tuple[Any, Any]:
        return describe_files(partial, (partial / TENSORS).glob(f"__{rank()}_*")), contents.trainer["parameters"]

    def publish(written: list[Any]) -> None:
        entries = {name: entry for _, rank_entries in written for name, entry in rank_entries.items()}
        write_json(partial / TRAINER, contents.trainer | {"parameters": entries}, indent=None)
        files = describe_files(partial, [partial / TENSORS / METADATA, partial / TRAINER])
        files |= {name: entry for rank_files, _ in written for name, entry in rank_files.items()}
        for name in files:
            if not (partial / name).is_file():
                raise OSError(f"{name} of another machine is not in {folder}: all machines need one shared folder")
        replace(contents.manifest, files=files).write(partial)
        publish_checkpoint(folder, steps, warn)
        remove_old_checkpoints(folder, keep, keep_best, warn)

    try:
        _on_all_ranks(group, lambda: begin_checkpoint(folder, steps) if rank() == 0 else None)
        _on_all_ranks(group, lambda: write_shards(partial / TENSORS, contents.tensors, group))
        written = _on_all_ranks(group, describe_own)
        _on_all_ranks(group, lambda: publish(written) if rank() == 0 else None)
    except CheckpointError:  # on all ranks: none writes any more
        if rank() == 0:  # the reason may be a full disk, and the error is to be reported on it
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _on_all_ranks(group: dist.ProcessGroup | None, work: Callable[[], Any]) -> list[Any]:
    """Do a piece of work on every rank and return the results of all ranks, by rank.

    Raises:
        CheckpointError: on every rank if one failed, so that no rank waits for it.
    """
    result, problem = None, None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 (any error must reach the other ranks)
        problem = _describe(error)
    answers: list[Any] = [(problem, result)]
    if group is not None:
        answers *= dist.get_world_size(group)
        dist.all_gather_object(answers, (problem, result), group=group)
    for problem, _ in answers:
        if problem is not None:
            failed, text = problem
            raise CheckpointError(f"the checkpoint could not be written on {text}", rank=failed)
    return [value for _, value in answers]


def _describe(error: Exception) -> tuple[int | None, str]:
    """Return the rank that failed, which is another one where tensors could not be written there, and a text that names it."""
    if isinstance(error, CheckpointError):
        return error.rank, str(error)
    return rank(), f"rank {rank()}: {describe_failure(error)}"


class BackgroundTask:
    """A thread beside the training, whose error is raised in the thread that joins it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        # Where the training ends without joining it, the process does not wait for it.
        self._thread = threading.Thread(target=self._run, name="benchbox-checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 (raised by `join`)
            self._error = error

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the work, and raise its error."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
