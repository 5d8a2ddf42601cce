"""A walk to the largest batch that fits: the next batch to try, computed from the launches that exist and nothing else.

A walk is one point of the other axes. It begins with the batch `start`, goes on with the largest batch that theory predicts to
fit, doubles its steps upwards until a launch runs out of memory, and halves the bracket between the largest batch that fits and
the smallest that does not until they are neighbours. Both of them are launches of the walk itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from benchbox.registry.launch_record import CellDict

Outcome = Literal["complete", "capped", "nothing fits", "pruned", "failed", "contradictory", "unfinished"]

_NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Batches that other walks show to fit and not to fit, with the cell that shows the latter."""

    fits: int = 0
    fails: int | None = None
    fails_cell: CellDict | None = None


NO_BOUNDS = Bounds()


def walk_point(cell: CellDict) -> str:
    """Return a text that is equal for all batches of a walk, and for no others."""
    return json.dumps({**cell, "batch": None}, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkState:
    """State of a walk: how it ended, or the batch to try."""

    outcome: Outcome
    largest: int | None = None  # that fits, of the walk's own launches
    beyond: int | None = None  # the smallest that does not fit, of its own launches
    batch: int | None = None  # to try; null unless it is unfinished


def walk_state(
    statuses: Mapping[int, str],
    *,
    start: int = 1,
    at_most: int | None = None,
    predicted: int | None = None,
    bounds: Bounds = NO_BOUNDS,
) -> WalkState:
    """Return the state of a walk after launches with these statuses, by batch.

    Args:
        start: the batch to begin with, unless another walk shows that it does not fit.
        at_most: the largest batch to try.
        predicted: the largest batch that fits, by theory; it may be wrong, which costs launches.
        bounds: from other walks; those that contradict the walk's own launches are ignored.
    """
    largest = max((batch for batch, status in statuses.items() if status == "ok"), default=None)
    beyond = min((batch for batch, status in statuses.items() if status == "oom"), default=None)

    def state(outcome: Outcome, batch: int | None = None) -> WalkState:
        return WalkState(outcome=outcome, largest=largest, beyond=beyond, batch=batch)

    if any(status not in ("ok", "oom") for status in statuses.values()):
        return state("failed")
    fits, fails = largest or 0, beyond or _NO_LIMIT
    if fits >= fails:
        return state("contradictory")
    # The start was another one, or a bound that other walks no longer show kept this walk from it.
    highest = min(fails, bounds.fails or _NO_LIMIT, (at_most or _NO_LIMIT) + 1)
    if statuses and start not in statuses and start < highest:
        return state("unfinished", start)
    if fits + 1 == fails:
        return state("complete" if fits else "nothing fits")
    if at_most is not None and fits >= at_most:  # more, where at_most was lowered since
        return state("capped")
    if bounds.fails == 1 and not fits:
        return state("pruned")
    limit = at_most or _NO_LIMIT
    lower, upper = max(fits, bounds.fits), min(fails, bounds.fails or _NO_LIMIT)
    if lower >= upper:
        lower, upper = fits, fails
    lower = min(lower, limit)
    if not statuses and start < upper:
        return state("unfinished", start)
    if upper - lower == 1 or lower == limit:  # the walks together know, and this one launches what it has not shown itself
        return state("unfinished", lower if fits < lower else upper)
    return state("unfinished", min(limit, _between(lower, upper, predicted, start)))


def _between(lower: int, upper: int, predicted: int | None, start: int) -> int:
    """Return the batch to try above one that fits and below one that does not, if that is known."""
    if predicted is not None and lower < predicted < upper:
        return predicted
    middle = (lower + upper) // 2
    if upper == _NO_LIMIT:
        return max(start, 2 * lower) if predicted is None else lower + max(1, lower - predicted)
    if predicted is not None and predicted <= lower:
        return min(middle, lower + max(1, lower - predicted))
    if predicted is not None and predicted >= upper:
        return max(middle, upper - max(1, predicted - upper))
    return middle


def bounds_from(cell: CellDict, others: Iterable[tuple[CellDict, str]]) -> Bounds:
    """Return what launches of other walks, as (cell, status), imply for the walk of a cell.

    More cameras never need less memory, nor does training without checkpointing, when all else is equal.
    """
    bounds: dict[str, Any] = {"fits": 0, "fails": None}
    for other, status in others:
        if status == "oom" and (bounds["fails"] is None or other["batch"] < bounds["fails"]) and needs_no_less(cell, other):
            bounds |= {"fails": other["batch"], "fails_cell": other}
        if status == "ok" and other["batch"] > bounds["fits"] and needs_no_less(other, cell):
            bounds["fits"] = other["batch"]
    return Bounds(**bounds)


def needs_no_less(cell: CellDict, other: CellDict) -> bool:
    """Return whether a cell is known to need at least the memory of another one at the same batch, without being its equal."""
    same = all(value == other.get(field) for field, value in cell.items() if field not in ("batch", "cams", "checkpointing"))
    more = (cell["cams"] - other["cams"], other["checkpointing"] - cell["checkpointing"])
    return same and min(more) >= 0 and max(more) > 0
