"""Exclusive use of a run directory."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchbox.errors import ConfigurationError
from benchbox.store.files import remove_temporary_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What runs and trainings write atomically. Not `nodes`, where other nodes may have begun.
_WRITTEN = {
    "chain.jsonl",
    "data.json",
    "findings.jsonl",
    "metrics.jsonl",
    "predictions.json",
    "records.parquet",
    "report.html",
    "report.md",
    "restarts.json",
    "run.json",
    "table.csv",
    "table.parquet",
    "validation.jsonl",
    "weights.json",
}
_FOLDERS = ("cells", "figures", "slurm", "launch", "checkpoints")


@contextmanager
def lock_run_directory(folder: Path) -> Iterator[None]:
    """Lock the run directory for this process, creating it where it does not exist, and remove what a killed one half wrote.

    The kernel releases the lock when its holder dies, however it dies, so a stale lock cannot exist; the process id in the
    file is for people.

    Raises:
        ConfigurationError: another process holds the lock, or the directory cannot be created, written or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigurationError(f"{folder}: {error.strerror}; name another directory with --out") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise ConfigurationError(
                f"{folder}: another run (process {holder}) is using it; wait for it, or name another directory with --out"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"{folder}: cannot be locked ({error.strerror}); name a directory of another file system with --out"
            ) from None
        remove_temporary_files(folder, names=_WRITTEN, subfolders=_FOLDERS)
        yield
    finally:
        os.close(descriptor)
