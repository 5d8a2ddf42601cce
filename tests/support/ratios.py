"""Ratios of two measurements in one process, recorded in the JSON of pytest-benchmark as `benchbox check` reads them."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence


def record_ratio(
    benchmark,
    name: str,
    values: float | Sequence[float],
    *,
    better: Literal["lower", "higher"],
    goal: float | None = None,
) -> None:
    """Record a ratio of the running test.

    Args:
        benchmark: the fixture of pytest-benchmark, which must have run something.
        name: `a_over_b`, or `a_share_of_b`.
        values: the ratio, or its values in all rounds, of which the median is recorded.
        goal: the bound that the test asserts, if it asserts one on this value.
    """
    rounds = list(values) if not isinstance(values, float | int) else []
    value = median(rounds) if rounds else values
    entry = {"value": value, "better": better, "goal": goal} | ({"rounds": rounds} if rounds else {})
    benchmark.extra_info.setdefault("ratios", {})[name] = entry
