"""Runs and baselines as they are in a commit: `REV:PATH`, as git writes it."""

from __future__ import annotations

import posixpath
import re
import subprocess
from typing import TYPE_CHECKING

from benchbox.errors import RecordError

if TYPE_CHECKING:
    from pathlib import Path

_LAUNCH = re.compile(r"(^|/)cells/[0-9a-f]+/launch-[0-9]+\.json$")
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
    prefix = posixpath.normpath(path)
    prefix = "" if prefix == "." else f"{prefix}/"  # as git lists it
    listing = _git("ls-tree", "-r", "-z", "--name-only", revision, "--", f"{prefix}cells") or b""
    launches = [name.removeprefix(prefix) for name in listing.decode().split("\0") if _LAUNCH.search(name)]
    for file in (*_RUN_FILES, *launches):
        content = _git("show", f"{revision}:./{prefix}{file}")
        if content is not None:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
    if not (folder / "run.json").is_file():
        raise RecordError(f"{name}: no run in that commit (no run.json); `benchbox report RUN --pack` makes one to commit")
    return folder


def revisions_of(path: str) -> list[tuple[str, str]]:
    """Return the commits that changed a published run or a baseline, the oldest first: `REV:PATH` and the time of the commit.

    Empty where the path is not in the history of a repository. A commit that removed it is left out.
    """
    clean = path.rstrip("/")
    files = [clean] if clean.endswith(".json") else [f"{clean}/{name}" for name in ("run.json", "records.parquet", "cells")]
    log = _git("log", "--reverse", "--format=%H %cI", "--", *files)
    entries = [line.split() for line in (log or b"").decode().splitlines()]
    present = clean if clean.endswith(".json") else f"{clean}/run.json"
    return [
        (f"{commit[:10]}:{clean}", time)
        for commit, time in entries
        if _git("cat-file", "-e", f"{commit}:./{present}") is not None
    ]


def commit_order() -> dict[str, int]:
    """Return the position of every commit of the current branch, the oldest first; empty outside a repository."""
    log = _git("rev-list", "--reverse", "--topo-order", "HEAD")
    return {commit: position for position, commit in enumerate((log or b"").decode().split())}


def is_unchanged(name: str) -> bool:
    """Return whether the working tree has the same content as `REV:PATH`."""
    revision, _, path = name.partition(":")
    return _git("diff", "--quiet", revision, "--", path) is not None


def _git(*arguments: str) -> bytes | None:
    """Return what git prints, or None if it fails or is not there."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
