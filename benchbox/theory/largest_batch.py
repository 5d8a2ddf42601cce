"""The largest batch that fits into a limit, by predicted peaks of a few batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_LIMIT = 10**6
MAX_PREDICTED = 256  # larger batches are extrapolated: their samples would be read for little
_MAX_EXTRAPOLATED = 16 * MAX_PREDICTED  # beyond, another moment of the step may have the peak


def largest_batch(peak_bytes: Callable[[int], int], limit_bytes: int, *, at_most: int | None = None) -> int:
    """Return the largest batch whose predicted peak is within the limit, 0 if there is none.

    The peak is the highest of several moments of a step, and each of them grows evenly with the batch. So the line through two
    batches is exact or too low beyond them, and too high between them: it gives the batch to predict next. Beyond
    `MAX_PREDICTED` it is the line through that batch and half of it, and the result may be too large; it is at most
    16 times that batch, unless `at_most` is given.

    Args:
        peak_bytes: predicts the peak of a rank at a batch. It is asked for each batch once.
    """
    peaks = {1: peak_bytes(1)}
    if peaks[1] > limit_bytes:
        return 0
    lower, upper = 1, (at_most or _NO_LIMIT) + 1
    while upper - lower > 1:
        batch = max(lower, min(_on_line(peaks, lower, upper, limit_bytes), upper - 1))
        if batch == lower:
            return batch
        if lower >= MAX_PREDICTED:
            half = MAX_PREDICTED // 2
            peaks[half] = peaks[half] if half in peaks else peak_bytes(half)
            return max(lower, min(_crossing(peaks, half, lower, limit_bytes), at_most or _MAX_EXTRAPOLATED))
        batch = min(batch, MAX_PREDICTED)
        peaks[batch] = peak_bytes(batch)
        if peaks[batch] <= limit_bytes:
            lower = batch
        else:
            upper = batch
    return lower


def _on_line(peaks: dict[int, int], lower: int, upper: int, limit_bytes: int) -> int:
    """Return the batch at the limit on the line through two batches: the bracket, or the two largest that fit."""
    fitting = sorted(batch for batch in peaks if batch <= lower)
    if len(fitting) < 2:
        return lower + 1
    beyond = _crossing(peaks, fitting[-2], lower, limit_bytes)
    if upper not in peaks or beyond == lower:
        return beyond
    return max(lower + 1, _crossing(peaks, lower, upper, limit_bytes))


def _crossing(peaks: dict[int, int], first: int, second: int, limit_bytes: int) -> int:
    growth = (peaks[second] - peaks[first]) / (second - first)
    return _NO_LIMIT if growth <= 0 else first + int((limit_bytes - peaks[first]) / growth)
