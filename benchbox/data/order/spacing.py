"""Positions at equal distances, for what looks at a part of the data."""

from __future__ import annotations

import numpy as np


def evenly_distributed(length: int, number: int) -> list[int]:
    """Return at most `number` different indices below `length`, at equal distances."""
    return [int(i) for i in np.unique(np.linspace(0, length - 1, number, dtype=np.int64))] if length else []
