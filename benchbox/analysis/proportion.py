"""Confidence interval of a share, such as a success rate."""

from __future__ import annotations

import math

_Z_95 = 1.959963984540054  # quantile 0.975 of the standard normal distribution


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95% score interval of a binomial proportion (Wilson 1927).

    Unlike the normal approximation it holds for few trials and for shares of 0 and 1, and never leaves [0, 1].

    Raises:
        ValueError: there are no trials.
    """
    if trials < 1:
        raise ValueError("an interval needs at least one trial")
    share, z = successes / trials, _Z_95
    centre = share + z * z / (2 * trials)
    half_width = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - half_width) / scale), min(1.0, (centre + half_width) / scale)
