"""Fit of measured collectives to the alpha-beta model: a call of B bytes takes `latency + B / bandwidth`.

(Hockney, Parallel Computing 20(3), 1994.) Squared relative errors are minimised, so that a call of a kibibyte counts as much as
one of 64 MiB, which takes ten thousand times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Latency and bandwidth of one collective, and the relative errors of the fit over the measured sizes."""

    latency_s: float
    bytes_per_s: float
    median_error: float
    max_error: float


def fit_link(times: Sequence[tuple[int, float]]) -> LinkFit:
    """Fit measurements (bytes, seconds) of at least two sizes. Latency is at least 0, and the bandwidth finite.

    Raises:
        ValueError: the times do not grow with the size, so that there is no bandwidth.
    """
    weights = [1 / seconds**2 for _, seconds in times]
    total = sum(weights)
    mean_size = sum(weight * size for weight, (size, _) in zip(weights, times, strict=True)) / total
    mean_time = sum(weight * seconds for weight, (_, seconds) in zip(weights, times, strict=True)) / total
    covariance = sum(w * (size - mean_size) * (seconds - mean_time) for w, (size, seconds) in zip(weights, times, strict=True))
    variance = sum(weight * (size - mean_size) ** 2 for weight, (size, _) in zip(weights, times, strict=True))
    slope = covariance / variance if variance else 0.0
    latency_s = mean_time - slope * mean_size
    if latency_s < 0:  # the best line with a latency of 0
        latency_s = 0.0
        slope = sum(w * s * t for w, (s, t) in zip(weights, times, strict=True))
        slope /= sum(w * s * s for w, (s, _) in zip(weights, times, strict=True))
    if slope <= 0:
        raise ValueError("the times of a collective do not grow with its size")
    errors = [abs((latency_s + slope * size) / seconds - 1) for size, seconds in times]
    return LinkFit(latency_s=latency_s, bytes_per_s=1 / slope, median_error=median(errors), max_error=max(errors))
