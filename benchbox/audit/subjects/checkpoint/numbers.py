"""Measure the values of stored tensors. Every element counts, but a chunk at a time: the tensors are mapped from files, and may
together be larger than memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.observer.facts import SIXTEEN_BIT, UpdateStatistics
from benchbox.observer.numerics.expected_update import adam_betas, differing_share
from benchbox.observer.numerics.probes import WeightedShare
from benchbox.observer.numerics.rounding import bf16_valued_share, stalled_share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from benchbox.audit.subjects.checkpoint.stored import StoredArray, StoredSteppedTensor

_CHUNK_ELEMENTS = 2**16  # fits into a core's cache: larger chunks take longer
_COMPARED_ELEMENTS = 2**12  # enough to tell two weights apart
# State that stays zero where no gradient ever came, the most reliable first.
_HISTORY = ("exp_avg_sq", "exp_avg", "momentum_buffer")


def measure_numbers(tensor: StoredSteppedTensor) -> UpdateStatistics:
    """Measure traces of rounding in a stepped tensor and its state, and the difference between master and live weight."""
    second_moment, betas = tensor.state.get("exp_avg_sq"), adam_betas(tensor.options)
    stalled = None
    if second_moment is not None and second_moment.dtype in SIXTEEN_BIT and betas is not None:
        stalled = stalled_share(second_moment.read(), betas[1])
    return UpdateStatistics(
        second_moment_stalled=stalled,
        steps_before=None if tensor.step_count is None else int(tensor.step_count),
        bf16_valued=_bf16_valued(tensor),
        live_differs=_live_differs(tensor),
    )


def _bf16_valued(tensor: StoredSteppedTensor) -> dict[str, float]:
    """Return the shares that the facts define: of float32 elements that are not zero and, as far as the state shows, had a
    gradient. For a weight that may be one of several candidates it is the share over all: 1 only if it is 1 for each.
    """
    weights = (tensor.weight,) if tensor.weight is not None else tensor.candidates
    running_shares = {name: WeightedShare() for name in ("weight", *tensor.state)}
    readable = {name: array for name, array in tensor.state.items() if array.parts_bytes is None}
    history = next((readable[name] for name in _HISTORY if name in readable), None)
    for weight in weights:
        matched = tensor.weight is not None and tensor.state_is_matched
        _count_bf16_valued(running_shares["weight"], weight, history if matched else None)
    for name, array in tensor.state.items():
        if array.elements > 1:  # numbers for the whole tensor, as NAdam's `mu_product`, are no moments
            _count_bf16_valued(running_shares[name], array, history)
    return {name: running_share.share for name, running_share in running_shares.items() if running_share.share is not None}


def _count_bf16_valued(running_share: WeightedShare, array: StoredArray, history: StoredArray | None) -> None:
    if array.dtype != "float32":
        return
    history_chunks = _chunks(history) if history is not None and history.shape == array.shape else None
    for chunk in _chunks(array):
        mask = chunk != 0 if history_chunks is None else (chunk != 0) & (next(history_chunks) != 0)
        counted = chunk[mask]
        running_share.add(bf16_valued_share(counted), counted.numel())


def _live_differs(tensor: StoredSteppedTensor) -> float | None:
    """Return the share of elements in which the live weight is not the master rounded to its dtype."""
    if tensor.live is None or tensor.weight is None:
        return None
    live = _flatten(tensor.live.array)[tensor.live.start : tensor.live.stop]
    master = _flatten(tensor.weight)
    if live.numel() != master.numel() or not live.numel():
        return None
    running_share = WeightedShare()
    for master_chunk, live_chunk in zip(master.split(_CHUNK_ELEMENTS), live.split(_CHUNK_ELEMENTS), strict=True):
        running_share.add(differing_share(master_chunk.to(live_chunk.dtype), live_chunk), master_chunk.numel())
    return running_share.share


def nearest_candidate(master: StoredArray, candidates: Mapping[str, StoredArray]) -> tuple[str, float]:
    """Return the candidate most like a master rounded to its dtype, and the share that differs, over their first elements; or
    ("", 1.0) without candidates.
    """
    sample = _flatten(master)[:_COMPARED_ELEMENTS]
    nearest = "", 1.0
    for name, candidate in candidates.items():
        candidate_sample = _flatten(candidate)[:_COMPARED_ELEMENTS]
        share = differing_share(sample.to(candidate_sample.dtype), candidate_sample)
        if share < nearest[1] or not nearest[0]:
            nearest = name, share
        if share == 0.0:
            break
    return nearest


def _chunks(array: StoredArray) -> Iterator[Tensor]:
    yield from _flatten(array).split(_CHUNK_ELEMENTS)


def _flatten(array: StoredArray) -> Tensor:
    return array.read().detach().reshape(-1)
