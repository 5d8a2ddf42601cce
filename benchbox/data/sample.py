"""Sample dataset that is part of the package."""

from __future__ import annotations

from benchbox.registry.bundled import sample_path
from benchbox.spec.datasets import DatasetSpec

__all__ = ["SAMPLE", "sample_path"]

SAMPLE = DatasetSpec(path="sample", source="sample")
