"""Folders of files that come with benchbox: policies, matrices, the sample dataset."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def bundled_folders(name: str) -> list[Path]:
    """Return where the bundled files of that name may be: in an installed benchbox, or in a checkout."""
    return [_PACKAGE / "_bundled" / name, _PACKAGE.parent / name]


def sample_path() -> Path:
    """Return the folder of the sample dataset, in a checkout as well as in an installed wheel."""
    return _PACKAGE / "data" / "sample_dataset"
