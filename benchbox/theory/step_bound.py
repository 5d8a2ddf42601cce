"""Least time of a step on a machine whose peaks and links were measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from benchbox.theory.links import Device

if TYPE_CHECKING:
    from benchbox.store.peaks import MeasuredPeaks, MeasuredRate
    from benchbox.theory.links import MeasuredLink
    from benchbox.theory.prediction import Estimate

_SOURCE = "benchbox doctor --peaks"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """Lower bound of the time of a step, what sets it, and the relative uncertainty of the rates that it was computed from."""

    seconds: float
    limit: Literal["computation", "communication"]
    uncertainty: float
    lacks_links: bool = False  # what several ranks communicate is left out


def bound_step(estimate: Estimate, dtype: str, peaks: MeasuredPeaks, link: MeasuredLink | None) -> StepBound | str:
    """Return the lower bound of the smallest step, or why there is none.

    Args:
        estimate: of the cell.
        dtype: of its matrix products.
        peaks: of a rank in a group like that of the cell.
        link: between its ranks; without one, what several ranks communicate is left out.
    """
    if estimate.smallest_step_flops is None:
        return "the policy has optional parts and declares no formula of its FLOPs, so that its smallest step is not known"
    products, memory = _fastest_products(peaks, dtype), peaks.best_memory
    if isinstance(products, str):
        return products
    device = Device(name=peaks.group, flops_per_s=products["per_s"], bytes_per_s=memory["per_s"], source=_SOURCE)
    smallest = replace(estimate, model_flops=estimate.smallest_step_flops, recomputed_flops=0)
    compute_s = smallest.compute_time_s(device)
    lacks_links = link is None and estimate.world_size > 1
    seconds = compute_s if lacks_links else smallest.step_time_s(device, link)[0]
    if not seconds:
        return "the prediction has neither FLOPs nor bytes that take time"
    if link is not None and seconds > compute_s:
        return StepBound(seconds=seconds, limit="communication", uncertainty=link.error)
    uncertainty = max(products["spread"], memory["spread"])
    return StepBound(seconds=seconds, limit="computation", uncertainty=uncertainty, lacks_links=lacks_links)


def _fastest_products(peaks: MeasuredPeaks, dtype: str) -> MeasuredRate | str:
    """Return the highest rate of products in a dtype, or why it is not known."""
    # A GPU may run products in float32 as TF32, and records do not say which of them: the faster of the two bounds both.
    dtypes = ("float32", "tf32") if peaks.device == "cuda" and dtype == "float32" else (dtype,)
    rates = []
    for name in dtypes:
        if (rate := peaks.best_matmul(name)) is None:
            return f"the measured peaks of {peaks.group} have no products in {name}"
        rates.append(rate)
    return max(rates, key=lambda rate: rate["per_s"])
