"""Checkpoints as subjects of the audit: read without running any code in them, whichever program wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.audit.subjects.checkpoint.facts import checkpoint_facts
from benchbox.audit.subjects.checkpoint.files import (
    distributed_folders,
    lerobot_folder,
    model_files,
    optimizer_files,
    read_file,
    read_folder,
    read_lerobot,
)
from benchbox.audit.subjects.checkpoint.trained import read_trained, trained_checkpoint
from benchbox.audit.subjects.checkpoint.unpartitioned import read_unpartitioned
from benchbox.audit.subjects.checkpoint.zero import has_partitions, read_zero, zero_folder
from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.audit.subjects.checkpoint.stored import RankCheckpoint
    from benchbox.observer.facts import RankFacts

_FORMATS = (
    "give a folder of DeepSpeed ZeRO, torch.distributed.checkpoint (FSDP), accelerate, transformers, LeRobot or benchbox, or a "
    "file of safetensors or torch.save"
)


def read_checkpoint(path: Path) -> list[RankFacts]:
    """Read the facts of every rank from a checkpoint. Its format is recognised by its files.

    Raises:
        DataError: there is no checkpoint, it is damaged, or it could only be read by running code in it.
    """
    try:
        return checkpoint_facts(_read_ranks(path))
    except FileNotFoundError as error:  # a folder lists links whose files are gone
        raise DataError(f"{error.filename}: is a link to a file that is missing, or was removed meanwhile") from error


def _read_ranks(path: Path) -> list[RankCheckpoint]:
    if not path.exists():
        raise DataError(f"{path}: no such file or directory")
    if path.is_file():
        return read_file(path)
    if not path.is_dir():  # opening a pipe would wait for its writer
        raise DataError(f"{path}: neither a file nor a folder")
    if (state := lerobot_folder(path)) is not None:
        return read_lerobot(state)
    if (trained := trained_checkpoint(path)) is not None:
        return read_trained(trained)
    if (zero := zero_folder(path)) is not None:
        return read_zero(zero) if has_partitions(zero) else read_unpartitioned(zero)
    if folders := distributed_folders(path):
        from benchbox.audit.subjects.checkpoint.distributed import read_distributed  # imports much of torch

        return read_distributed(folders)
    if model_files(path) or optimizer_files(path):
        return read_folder(path)
    raise DataError(f"{path}: {_explain_no_checkpoint(path)}; {_FORMATS}")


def _explain_no_checkpoint(folder: Path) -> str:
    """Explain why a folder is no checkpoint. If it is the folder of a run, the listed sub-folders lead to its checkpoints."""
    subfolders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not any(folder.iterdir()):
        return "the folder is empty"
    if any(folder.glob("*.distcp")):
        return "holds *.distcp and no .metadata, which is written last: the save did not end, or the file was not copied"
    return f"holds no checkpoint, but folders: {', '.join(subfolders[:10])}" if subfolders else "holds no checkpoint"
