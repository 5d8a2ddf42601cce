"""Noise floor of a machine from launches of one cell, and what follows from it for thresholds and numbers of launches."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from statistics import NormalDist, stdev
from typing import TYPE_CHECKING

from benchbox import __version__
from benchbox.analysis.comparability import mixed_environment
from benchbox.analysis.inference import ALPHA, Effect, estimate_effect, launches_to_settle
from benchbox.errors import RecordError
from benchbox.registry.metrics import metric_by_name
from benchbox.store.noise import Noise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.analysis.summary import CellSummary

POWER = 0.9  # probability with which a difference of the noise floor is found
MIN_LAUNCHES = 2 * 5  # of both halves: with fewer there is no interval


def split_launches(values: Mapping[int, float]) -> tuple[dict[int, float], dict[int, float]]:
    """Return odd and even launches, by round: A and B of an A/A comparison, interleaved as two cells are."""
    return (
        {(number + 1) // 2: value for number, value in values.items() if number % 2},
        {number // 2: value for number, value in values.items() if number % 2 == 0},
    )


def measure_noise(summary: CellSummary, cell: str) -> tuple[Noise, Effect]:
    """Return the noise of a cell's launches and the A/A comparison of their halves.

    Raises:
        RecordError: fewer launches ended ok than a comparison needs, or they differ in their versions.
    """
    if mixed := mixed_environment(summary.ok, cell):
        raise RecordError(f"{'; '.join(mixed.values())}: measure all of them in another run directory, --out DIR")
    values = summary.by_launch(metric_by_name("step_time_s"))
    if len(values) < MIN_LAUNCHES:
        raise RecordError(f"{len(values)} launches of {cell} ended ok, and {MIN_LAUNCHES} are needed to measure noise")
    effect = estimate_effect(*split_launches(values))
    noise = Noise(
        sigma=stdev(math.log(value) for value in values.values()),
        launches=len(values),
        ratio=effect.ratio,
        cell=cell,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        benchbox_version=__version__,
    )
    return noise, effect


def noise_floor(sigma: float, launches: int) -> float:
    """Return the smallest relative difference that launches of each side show with probability `POWER`, at `ALPHA`.

    exp((t(1 - alpha / 2) + t(power)) * sigma * sqrt(2 / n)) - 1 with 2n - 2 degrees of freedom: the sample-size formula of a
    two-sample t test (Lachin, Controlled Clinical Trials 2, 1981), for logarithms of step times. It is approximate, because
    verdicts come from exact tests. For 5 to 7 launches, where an exact test needs a larger difference, the sum is simulated.
    """
    return math.exp(_deviations(launches) * sigma * math.sqrt(2 / launches)) - 1


def launches_for(sigma: float, difference: float) -> int:
    """Return the launches of each cell from which on `noise_floor` is at most this difference."""
    # A normal distribution asks for fewer.
    normal = sum(NormalDist().inv_cdf(probability) for probability in _PROBABILITIES)
    launches = max(launches_to_settle(), math.floor(2 * (normal * sigma / math.log(1 + difference)) ** 2))
    while noise_floor(sigma, launches) > difference:
        launches += 1
    return launches


# Standard errors of a difference that the exact test finds with probability `POWER` in normal noise, by number of launches.
# Found by bisection over simulated comparisons, 200,000 for 5 launches and 1,000 for 6 and 7.
_SIMULATED = {5: 5.62, 6: 4.87, 7: 4.55}
_PROBABILITIES = (1 - ALPHA / 2, POWER)


def _deviations(launches: int) -> float:
    fewest = max(launches, launches_to_settle())
    return _SIMULATED.get(fewest) or sum(_t_quantile(probability, 2 * fewest - 2) for probability in _PROBABILITIES)


def _t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t, by its expansion around the normal one (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def noise_of_matrix(noises: Mapping[str, Noise], matrix: str) -> Noise | None:
    """Return the noise of a matrix, else the largest of the machine's other matrices, or None."""
    return noises.get(matrix) or max(noises.values(), key=lambda noise: noise.sigma, default=None)
