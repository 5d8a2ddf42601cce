"""Least time of a step on a machine whose peaks and links were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchbox.theory.links import Device

if TYPE_CHECKING:
    from benchbox.store.peaks import MeasuredPeaks
    from benchbox.theory.links import MeasuredLink
    from benchbox.theory.prediction import Estimate

_SOURCE = "benchbox doctor --peaks"
_SUBSTITUTES = {"float32": "tf32"}  # a GPU may run products in float32 as those, and records do not say which


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """Lower bound of the time of a step, what sets it, and the relative uncertainty of the rates that it was computed from."""

    seconds: float
    limit: Literal["computation", "communication"]
    uncertainty: float


def bound_step(estimate: Estimate, dtype: str, peaks: MeasuredPeaks, link: MeasuredLink | None) -> StepBound | None:
    """Return the lower bound of a step; None where nothing is known to bound it.

    Args:
        estimate: of the cell.
        dtype: of its matrix products.
        peaks: of a rank in a group like that of the cell.
        link: between its ranks; without one, what several ranks communicate is left out.
    """
    rates = [rate for name in {dtype, _SUBSTITUTES.get(dtype, dtype)} for rate in peaks.matmul.get(name, {}).values()]
    if not rates:
        return None
    products, memory = (max(group, key=lambda rate: rate["per_s"]) for group in (rates, (peaks.copy, peaks.update)))
    device = Device(name=peaks.group, flops_per_s=products["per_s"], bytes_per_s=memory["per_s"], source=_SOURCE)
    compute_s = estimate.compute_time_s(device)
    seconds = compute_s if link is None and estimate.world_size > 1 else estimate.step_time_s(device, link)[0]
    if not seconds:
        return None
    if link is not None and seconds > compute_s:
        return StepBound(seconds=seconds, limit="communication", uncertainty=link.error)
    return StepBound(seconds=seconds, limit="computation", uncertainty=max(products["spread"], memory["spread"]))
