"""Changes of peaks of memory between runs. Chance raises the peak of a launch and never lowers it.

A thread of gloo may hold the buffer of a collective a little longer, and what is allocated in that time comes on top
(docs/theory.md, "Peaks that depend on time"). In 946 published launches the peak was more than 1% above the others of its cell
in 27, and up to 5.2%.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from benchbox.registry.metrics import Metric

BY_CHANCE = 0.06  # no launch was seen whose peak chance had raised by more


def is_peak(metric: Metric) -> bool:
    """Return whether a metric is the memory that the launch with the highest peak needs."""
    return metric.launches == "worst" and metric.unit == "bytes"


def why_unsettled(before: Collection[float], after: Collection[float], relevant: float) -> str | None:
    """Return why launches do not show that a peak has changed, None if they do.

    A change beyond what chance does is one. Otherwise the lowest launches of both sides must show it too: they are free of
    chance unless it has raised every launch of a side, which one launch on a side does not tell.

    Args:
        before: peaks of launches, whose highest differs by more than `relevant` from that of `after`.
        relevant: relative change up to which there is none.
    """
    if not before or not after or min(*before, *after) <= 0:
        return None  # an older baseline has no launches, and its value is all there is
    if raised_beyond_chance(max(before), max(after)):
        return None
    if min(len(before), len(after)) == 1:
        return f"chance may raise the peak of a launch by up to {BY_CHANCE:.0%}: two launches on each side settle it"
    change = min(after) / min(before) - 1
    if abs(change) <= relevant or (change > 0) != (max(after) > max(before)):
        return f"the lowest peaks of launches differ by {change:+.1%}: chance may raise the peak of a launch"
    return None


def raised_beyond_chance(first: float, second: float) -> bool:
    """Return whether two peaks differ by more than chance raises one."""
    return max(first, second) > (1 + BY_CHANCE) * min(first, second)
