"""Statistics of a dataset's features in the format of LeRobot v3.0, exact over all frames including quantiles."""

from __future__ import annotations

from typing import Any

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
LEVELS = 256


def feature_statistics(values: np.ndarray) -> dict[str, list[Any]]:
    """Compute the statistics of rows (frames, ...): statistic -> values of that shape, and `count` -> [frames]."""
    rows = values.astype(np.float64)
    stats = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    stats |= {name: np.quantile(rows, q, axis=0) for name, q in QUANTILES.items()}
    return {name: value.tolist() for name, value in stats.items()} | {"count": [len(rows)]}


def pixel_histogram(image: np.ndarray) -> np.ndarray:
    """Count the values of each channel of an image (H, W, 3) uint8: (3, 256) int64. Histograms of frames can be added."""
    return np.stack([np.bincount(image[..., channel].ravel(), minlength=LEVELS) for channel in range(3)])


def image_statistics(histogram: np.ndarray, frames: int) -> dict[str, list[Any]]:
    """Compute the statistics of pixels, on the scale [0, 1], from their histogram (3, 256).

    Returns:
        statistic -> values shaped (3, 1, 1), and `count` -> [frames].
    """
    levels = np.arange(LEVELS) / (LEVELS - 1)
    total = histogram.sum(1, keepdims=True)
    mean = (histogram * levels).sum(1, keepdims=True) / total
    variance = (histogram * (levels - mean) ** 2).sum(1, keepdims=True) / total
    cumulative = histogram.cumsum(1) / total
    stats = {
        "min": levels[(histogram > 0).argmax(1)],
        "max": levels[LEVELS - 1 - (histogram[:, ::-1] > 0).argmax(1)],
        "mean": mean,
        "std": np.sqrt(variance),
    }
    stats |= {name: levels[(cumulative >= q).argmax(1)] for name, q in QUANTILES.items()}
    return {name: value.reshape(3, 1, 1).tolist() for name, value in stats.items()} | {"count": [frames]}
