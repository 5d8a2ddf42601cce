"""Runs and baselines as they are in a commit: `REV:PATH`, as git writes it."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from benchbox.errors import RecordError

if TYPE_CHECKING:
    from pathlib import Path

_RUN_FILES = ("run.json", "records.parquet", "chain.jsonl", "predictions.json")


def is_revision(name: str) -> bool:
    """Return whether a name is `REV:PATH` of a commit of the repository around the current folder."""
    revision, colon, path = name.partition(":")
    if not (revision and colon and path) or revision.startswith("-"):
        return False
    return _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}") is not None


def extract(name: str, folder: Path) -> Path:
    """Write the baseline file or the published run `REV:PATH` into a folder, and return its path there.

    Raises:
        RecordError: the commit has neither.
    """
    revision, _, path = name.partition(":")
    if path.endswith(".json"):
        content = _git("show", f"{revision}:./{path}")
        if content is None:
            raise RecordError(f"{name}: {revision} has no such file")
        target = folder / "baseline.json"
        target.write_bytes(content)
        return target
    for file in _RUN_FILES:
        content = _git("show", f"{revision}:./{path.rstrip('/')}/{file}")
        if content is not None:
            (folder / file).write_bytes(content)
    if not (folder / "run.json").is_file():
        raise RecordError(f"{name}: no run in that commit (no run.json); `benchbox report RUN --pack` makes one to commit")
    return folder


def _git(*arguments: str) -> bytes | None:
    """Return what git prints, or None if it fails or is not there."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
