"""What stored numbers say of the steps that made them. Tensors are looked at whole, but a piece at a time: they lie in mapped
files, and may together be larger than memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.observer.facts import UpdateStatistics
from benchbox.observer.numerics.expected_update import difference
from benchbox.observer.numerics.probes import SIXTEEN_BIT, WeightedShare
from benchbox.observer.numerics.rounding import bf16_valued_share, stalled_share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from benchbox.audit.subjects.checkpoint.stored import StoredArray, StoredSteppedTensor

_PIECE_ELEMENTS = 2**16  # stay in a core's cache: larger ones take longer
_FIRST_ELEMENTS = 2**12  # tell two weights from one another
# State that is zero where no gradient ever came, the surest first.
_HISTORY = ("exp_avg_sq", "exp_avg", "momentum_buffer")


def measure_numbers(each: StoredSteppedTensor) -> UpdateStatistics:
    """Marks of rounding in a stepped tensor and its state, and whether the live weight is what the master rounds to."""
    second, betas = each.state.get("exp_avg_sq"), each.options.get("betas")
    stalled = None
    if second is not None and second.dtype in SIXTEEN_BIT and isinstance(betas, (tuple, list)):
        stalled = stalled_share(second.read(), float(betas[1]))
    return UpdateStatistics(
        second_moment_stalled=stalled,
        steps_before=None if each.step_count is None else int(each.step_count),
        bf16_valued=_bf16_valued(each),
        live_differs=_live_differs(each),
    )


def _bf16_valued(each: StoredSteppedTensor) -> dict[str, float]:
    """As the facts define it: of float32 elements that are not zero and that had a gradient, as far as the state tells. Of a
    weight that may be one of several the share of all of them: it is 1 only if it is that of each.
    """
    weights = (each.weight,) if each.weight is not None else each.among
    tallies = {name: WeightedShare() for name in ("weight", *each.state)}
    past = next((each.state[name] for name in _HISTORY if name in each.state), None)
    for weight in weights:
        _count(tallies["weight"], weight, past if each.weight is not None and each.state_is_own else None)
    for name, value in each.state.items():
        if name != "step":
            _count(tallies[name], value, past)
    return {name: tally.share for name, tally in tallies.items() if tally.share is not None}


def _count(tally: WeightedShare, value: StoredArray, past: StoredArray | None) -> None:
    if value.dtype != "float32":
        return
    history = _pieces(past) if past is not None and past.shape == value.shape else None
    for piece in _pieces(value):
        counts = piece != 0 if history is None else (piece != 0) & (next(history) != 0)
        counted = piece[counts]
        tally.add(bf16_valued_share(counted), counted.numel())


def _live_differs(each: StoredSteppedTensor) -> float | None:
    """The share of elements in which the live weight is not the master, rounded to its dtype."""
    if each.live is None or each.weight is None:
        return None
    live = _flat(each.live.held)[each.live.start : each.live.stop]
    master = _flat(each.weight)
    if live.numel() != master.numel() or not live.numel():
        return None
    tally = WeightedShare()
    for mine, theirs in zip(master.split(_PIECE_ELEMENTS), live.split(_PIECE_ELEMENTS), strict=True):
        tally.add(difference(mine.to(theirs.dtype), theirs), mine.numel())
    return tally.share


def nearest_candidate(master: StoredArray, candidates: Mapping[str, StoredArray]) -> tuple[str, float]:
    """The candidate most like a master rounded to its dtype, and the share that differs, by the first elements. ("", 1.0) where
    there is none.
    """
    mine = _flat(master)[:_FIRST_ELEMENTS]
    best = "", 1.0
    for name, candidate in candidates.items():
        theirs = _flat(candidate)[:_FIRST_ELEMENTS]
        share = difference(mine.to(theirs.dtype), theirs)
        if share < best[1] or not best[0]:
            best = name, share
        if share == 0.0:
            break
    return best


def _pieces(value: StoredArray) -> Iterator[Tensor]:
    yield from _flat(value).split(_PIECE_ELEMENTS)


def _flat(value: StoredArray) -> Tensor:
    return value.read().detach().reshape(-1)
