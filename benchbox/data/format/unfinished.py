"""Recordings that were interrupted: the folder of an unfinished one, and how to finish it.

The recording of `demos` is in `demos.recording` until it is complete.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ARGUMENTS = "arguments.json"  # of the recording, in its folder
_SUFFIX = ".recording"


def recording_folder(root: Path) -> Path:
    """Return the folder of the unfinished recording of a dataset."""
    return root.with_name(root.name + _SUFFIX)


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
    root = root if root.name else root.resolve()  # the folder that a command runs in
    if not root.name:
        return None
    folder = root if (root / ARGUMENTS).is_file() else recording_folder(root)
    if not (folder / ARGUMENTS).is_file():
        return None
    root = folder.with_name(folder.name.removesuffix(_SUFFIX))
    try:
        command = record_command(json.loads((folder / ARGUMENTS).read_text(encoding="utf-8")), root)
    except (OSError, ValueError, KeyError, TypeError):
        return f"an unfinished recording whose {ARGUMENTS} is damaged; remove the folder and record again"
    return f"an unfinished recording; finish it with: {command}"
