"""Sample dataset that is part of the package."""

from __future__ import annotations

from pathlib import Path

from benchbox.spec.datasets import DatasetSpec

SAMPLE = DatasetSpec(path="sample", source="sample")


def sample_path() -> Path:
    """Return the folder of the sample dataset, in a checkout as well as in an installed wheel."""
    return Path(__file__).resolve().parent / "sample_dataset"
