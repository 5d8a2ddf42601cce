"""Recordings that were interrupted, and how to finish them."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from benchbox.registry.recordings import ARGUMENTS, dataset_of, find_unfinished

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def record_command(arguments: Mapping[str, Any], root: Path) -> str:
    """Return the command that records a dataset with these arguments of `recording.record`."""
    words = ["benchbox", "data", "record"]
    for env in arguments["envs"]:
        words += ["--env", env]
    words += ["--cameras", ",".join(arguments["cameras"])]
    for name in ("episodes", "size", "every", "seed"):
        words += [f"--{name}", str(arguments[name])]
    return shlex.join([*words, "--out", str(root)])


def how_to_finish(root: Path) -> str | None:
    """Return what to do with an unfinished recording, if `root` is one or the dataset that one will be; otherwise None."""
    folder = find_unfinished(root)
    if folder is None:
        return None
    try:
        command = record_command(json.loads((folder / ARGUMENTS).read_text(encoding="utf-8")), dataset_of(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return f"an unfinished recording whose {ARGUMENTS} is damaged; remove the folder and record again"
    return f"an unfinished recording; finish it with: {command}"
