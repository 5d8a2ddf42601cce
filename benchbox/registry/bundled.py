"""Folders of files that come with benchbox: policies and matrices."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def bundled_folders(name: str) -> list[Path]:
    """Return where the bundled files of that name may be: in an installed benchbox, or in a checkout."""
    return [_PACKAGE / "_bundled" / name, _PACKAGE.parent / name]
