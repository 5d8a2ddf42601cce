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
    """Lower bound of the time of a step, what sets it, and the relative uncertainty of the rates that it was computed from.

    `computation_alone` is why what several ranks communicate is left out; None where it is part of the bound.
    """

    seconds: float
    limit: Literal["computation", "communication"]
    uncertainty: float
    computation_alone: str | None = None


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
    reason = _computation_alone(estimate, link)
    seconds = compute_s if reason else smallest.step_time_s(device, link)[0]
    if not seconds:
        return "the prediction has neither FLOPs nor bytes that take time"
    if seconds > compute_s:
        assert link is not None
        return StepBound(seconds=seconds, limit="communication", uncertainty=link.error)
    uncertainty = max(products["spread"], memory["spread"])
    return StepBound(seconds=seconds, limit="computation", uncertainty=uncertainty, computation_alone=reason)


def _computation_alone(estimate: Estimate, link: MeasuredLink | None) -> str | None:
    if estimate.world_size == 1:
        return None
    if link is None:
        return "benchbox doctor --links measures their links"
    # DDP reduces all gradients in every step. Sharded parameters are gathered where their layer runs: some layers may not run.
    assert estimate.smallest_step_flops is not None
    is_smaller = estimate.smallest_step_flops < estimate.model_flops + estimate.recomputed_flops
    if is_smaller and not set(estimate.collectives) <= {"all_reduce", "broadcast"}:
        return "steps without optional parts may need fewer collectives than the predicted one"
    return None


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
