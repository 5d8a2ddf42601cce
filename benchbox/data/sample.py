"""The dataset that comes with benchbox."""

from __future__ import annotations

from pathlib import Path


def sample_path() -> Path:
    """Its folder: part of the package, so the same in a checkout and in an installed wheel."""
    return Path(__file__).resolve().parent / "sample_dataset"
