"""What stored numbers say of the steps that made them. Tensors are looked at whole, but a piece at a time: they lie in mapped
files, and may together be larger than memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchbox.measure.witness.facts import Numbers
from benchbox.measure.witness.looks import SIXTEEN_BIT, Tally
from benchbox.measure.witness.numerics import bf16_valued_share, stalled_share
from benchbox.measure.witness.updates import difference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchbox.audit.subjects.checkpoint.stored import Held, StoredTensor

_PIECE_ELEMENTS = 2**22
# State that is zero where no gradient ever came, the surest first.
_HISTORY = ("exp_avg_sq", "exp_avg", "momentum_buffer")


def numbers_of(each: StoredTensor) -> Numbers:
    """Marks of rounding in a stepped tensor and its state, and whether the live weight is what the master rounds to."""
    second, betas = each.state.get("exp_avg_sq"), each.options.get("betas")
    stalled = None
    if second is not None and second.dtype in SIXTEEN_BIT and isinstance(betas, (tuple, list)):
        stalled = stalled_share(second.read(), float(betas[1]))
    return Numbers(
        second_moment_stalled=stalled,
        steps_before=None if each.step_count is None else int(each.step_count),
        bf16_valued=_bf16_valued(each),
        live_differs=_live_differs(each),
    )


def _bf16_valued(each: StoredTensor) -> dict[str, float]:
    """As the facts define it: of float32 elements that are not zero and that had a gradient, as far as the state tells."""
    marked = {name: value for name, value in {"weight": each.weight, **each.state}.items() if _can_tell(name, value)}
    shape = next((value.shape for value in marked.values() if value is not None), ())
    history = next((each.state[name] for name in _HISTORY if name in each.state), None)
    if history is not None and history.shape != shape:
        history = None
    tallies = {}
    for name, value in marked.items():
        assert value is not None
        own = history if name != "weight" or each.state_is_own else None
        tallies[name] = _tally(value, own if own is not None and own.shape == value.shape else None)
    return {name: tally.share for name, tally in tallies.items() if tally.share is not None}


def _can_tell(name: str, value: Held | None) -> bool:
    return value is not None and value.dtype == "float32" and name != "step" and value.elements > 1


def _tally(value: Held, history: Held | None) -> Tally:
    tally = Tally()
    past = _pieces(history.read()) if history is not None else None
    for piece in _pieces(value.read()):
        counts = piece != 0 if past is None else (piece != 0) & (next(past) != 0)
        counted = piece[counts]
        tally.add(bf16_valued_share(counted), counted.numel())
    return tally


def _live_differs(each: StoredTensor) -> float | None:
    """The share of elements in which the live weight is not the master, rounded to its dtype."""
    if each.live is None or each.weight is None:
        return None
    live = _flat(each.live.held.read())[each.live.start : each.live.stop]
    master = _flat(each.weight.read())
    if live.numel() != master.numel() or not live.numel():
        return None
    tally = Tally()
    for mine, theirs in zip(master.split(_PIECE_ELEMENTS), live.split(_PIECE_ELEMENTS), strict=True):
        tally.add(difference(mine.to(theirs.dtype), theirs), mine.numel())
    return tally.share


def nearest(master: Held, candidates: Mapping[str, Held], elements: int = 2**12) -> tuple[str, float] | None:
    """The candidate that is most like a master rounded to its dtype, by the first elements, and the share that differs."""
    mine = _flat(master.read())[:elements]
    best: tuple[str, float] | None = None
    for name, candidate in candidates.items():
        theirs = _flat(candidate.read())[:elements]
        share = difference(mine.to(theirs.dtype), theirs)
        if best is None or share < best[1]:
            best = name, share
        if share == 0.0:
            break
    return best


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    yield from _flat(tensor).split(_PIECE_ELEMENTS)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1) if tensor.layout == torch.strided else tensor.detach().to_dense().reshape(-1)
