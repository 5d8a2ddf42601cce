"""Folders of recordings: that of `demos` is `demos.recording` until the dataset is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ARGUMENTS = "arguments.json"  # of an unfinished recording, in its folder
_SUFFIX = ".recording"


def recording_folder(root: Path) -> Path:
    """Return the folder of the unfinished recording of a dataset."""
    return root.with_name(root.name + _SUFFIX)


def dataset_of(folder: Path) -> Path:
    """Return the dataset that an unfinished recording will be."""
    return folder.with_name(folder.name.removesuffix(_SUFFIX))


def find_unfinished(root: Path) -> Path | None:
    """Return the folder of an unfinished recording, if `root` is one or the dataset that one will be; otherwise None."""
    root = root if root.name else root.resolve()  # the folder that a command runs in
    if not root.name:
        return None
    folder = root if (root / ARGUMENTS).is_file() else recording_folder(root)
    return folder if (folder / ARGUMENTS).is_file() else None
