"""Share of the measured peak of matrix products that forward and backward of a cell reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.quantities import quantity
from benchbox.registry.recipes import recipes
from benchbox.store.peaks import group_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.peaks import MeasuredPeaks

_PHASES = ("forward", "backward")


def share_of_peak(summary: CellSummary, record: LaunchRecord, peaks: Mapping[str, MeasuredPeaks]) -> str | None:
    """Return the rate of forward and backward on one rank and its share of the measured peak; None where it is not certain.

    Args:
        summary: of the cell.
        record: a launch of it that ended ok.
        peaks: of the machine of the record, by group of ranks.
    """
    flops, measured = record["flops"], peaks.get(group_of(record) or "")
    recipe = recipes().get(summary.cell["recipe"])
    has_optimizer_apart = not {*_PHASES, "optimizer"} & (record["fused_phases"] or {}).keys()
    if flops is None or measured is None or recipe is None or not has_optimizer_apart:
        return None
    model, recomputed = flops["model_flops_per_step"], flops.get("recomputed_flops_per_step")
    times = summary.phases if summary.ok else {}
    if model is None or recomputed is None or not all(phase in times for phase in _PHASES):
        return None
    if measured.device == "cuda" and recipe.compute == "float32":  # in TF32 or not: the record does not say it of each product
        return None
    if (products := measured.best_matmul(recipe.compute)) is None:
        return None
    best = products["per_s"]
    rate = (model + recomputed) / measured.ranks / sum(times[phase] for phase in _PHASES)
    if rate > best:
        return None
    return (
        f"{quantity(rate, 'FLOP')}/s on each rank, {rate / best:.0%} of the {quantity(best, 'FLOP')}/s that {recipe.compute} "
        "products reach on this machine (benchbox doctor --peaks)"
    )
