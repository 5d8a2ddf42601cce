"""Interleaving of groups by their weights."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import ceil, floor
from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.order.randomness import INTERLEAVING, generator
from benchbox.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_ROUND = 256  # units
MAX_ROUND = 2**20  # units, so that the permutation of a round stays small


class Interleaving:
    """Assignment of the units of a sequence to groups, in the exact proportion of their weights.

    The sequence is cut into rounds. Every round has at least one unit of every group, and after n whole rounds the number of
    units of a group differs from its share by less than one. A round is shuffled by the seed.

    Raises:
        ConfigurationError: a weight is not a positive number, or is too small next to the others.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        if not all(0 < weight < float("inf") for weight in weights):
            raise ConfigurationError(f"weights of datasets are positive numbers, and not {', '.join(map(str, weights))}")
        total = sum(map(Fraction, weights))
        shares = [Fraction(weight) / total for weight in weights]
        self._bounds = [Fraction(0), *accumulate(shares)]
        self._round = max(MIN_ROUND, ceil(2 / min(shares)))
        if self._round > MAX_ROUND:
            raise ConfigurationError(f"weight {min(weights)} is less than 1 in {MAX_ROUND // 2} of all weights: leave it out")
        self._seed = seed
        self._shuffled_round = lru_cache(maxsize=2)(self._shuffle_round)

    def locate(self, unit: int) -> tuple[int, int]:
        """Return the group of a unit, and its number among the units of this group."""
        if len(self._bounds) == 2:
            return 0, unit
        number, offset = divmod(unit, self._round)
        groups, numbers = self._shuffled_round(number)
        return int(groups[offset]), int(numbers[offset])

    def _units_before(self, group: int, unit: int) -> int:
        """Return how many of the first `unit` units are of a group. It is exact where a round begins."""
        return floor(unit * self._bounds[group + 1]) - floor(unit * self._bounds[group])

    def _shuffle_round(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the group of every unit in a round, and the number of the unit in its group."""
        start, stop = number * self._round, (number + 1) * self._round
        count = len(self._bounds) - 1
        ranges = [range(self._units_before(group, start), self._units_before(group, stop)) for group in range(count)]
        groups = np.repeat(np.arange(count), [len(units) for units in ranges])
        groups = generator(INTERLEAVING, self._seed, number).permutation(groups)
        numbers = np.empty_like(groups)
        for group, units in enumerate(ranges):
            numbers[groups == group] = units
        return groups, numbers
