"""Statistics of a dataset's features, as LeRobot v3.0 stores them: exact over every frame, quantiles included."""

from __future__ import annotations

from typing import Any

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
LEVELS = 256


def of_values(values: np.ndarray) -> dict[str, list[Any]]:
    """Of rows (frames, D): statistic -> D values, and `count` -> [frames]."""
    rows = values.astype(np.float64)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    found |= {name: np.quantile(rows, q, axis=0) for name, q in QUANTILES.items()}
    return {name: value.tolist() for name, value in found.items()} | {"count": [len(rows)]}


def histogram(image: np.ndarray) -> np.ndarray:
    """How often each channel of (H, W, 3) uint8 takes each value: (3, 256) int64. Histograms of frames add up."""
    return np.stack([np.bincount(image[..., channel].ravel(), minlength=LEVELS) for channel in range(3)])


def of_histogram(counts: np.ndarray, frames: int) -> dict[str, list[Any]]:
    """Of the pixels counted in (3, 256), on the scale [0, 1]: statistic -> values shaped (3, 1, 1), `count` -> [frames]."""
    levels = np.arange(LEVELS) / (LEVELS - 1)
    total = counts.sum(1, keepdims=True)
    mean = (counts * levels).sum(1, keepdims=True) / total
    spread = (counts * (levels - mean) ** 2).sum(1, keepdims=True) / total
    cumulative = counts.cumsum(1) / total
    found = {
        "min": levels[(counts > 0).argmax(1)],
        "max": levels[LEVELS - 1 - (counts[:, ::-1] > 0).argmax(1)],
        "mean": mean,
        "std": np.sqrt(spread),
    }
    found |= {name: levels[(cumulative >= q).argmax(1)] for name, q in QUANTILES.items()}
    return {name: value.reshape(3, 1, 1).tolist() for name, value in found.items()} | {"count": [frames]}
