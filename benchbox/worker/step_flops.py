"""FLOPs of the measured steps of a rank, from those of the probed one where all have the same shapes, else by formula."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from benchbox.measure.flops import unknown_utilisation
from benchbox.theory.flops import Cost, sum_costs, total_cost, training_cost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from benchbox.measure.outlines import BatchOutline
    from benchbox.measure.probe import ProbeResult
    from benchbox.registry.contracts import Batch, Policy
    from benchbox.registry.launch_record import Flops, TowerFlops
    from benchbox.store.rank_result import Utilisation

_NO_COST = "the policy declares no cost: it has no method `work`"
_NO_FORMULA = "batches differ in shape from step to step (padding: longest), and the policy declares no formula of their FLOPs"
_NOT_SCALABLE = (
    "batches differ in shape from step to step (padding: longest), and the policy's formula has no FLOPs of a step by which "
    "those counted in another one could be scaled"
)
_NO_STEP = "no step was measured"


def probed_flops(
    policy: Policy | None, probed: ProbeResult, step_time_s: Sequence[float], device: torch.device
) -> tuple[Flops, Utilisation]:
    """Return the FLOPs of the probed step, and the utilisation of measured steps that have the same shapes.

    Args:
        policy: not sharded, because formulas need the full sizes of its layers; None if it declares no cost.
        step_time_s: of the measured steps.
    """
    towers = None if policy is None else _tower_flops(_step_cost(policy, _moved_to(device, probed.micro_batches)))
    reason = None if policy else _NO_COST
    return {**probed.flops, "per_tower": towers, "per_tower_reason": reason}, probed.utilisation(step_time_s)


def mean_flops(
    policy: Policy | None,
    probed: ProbeResult,
    outlines: Sequence[BatchOutline],
    step_time_s: Sequence[float],
    device: torch.device,
) -> tuple[Flops, Utilisation]:
    """Return the mean FLOPs of measured steps whose batches differ in shape, and the utilisation. Unknown ones have a reason.

    The probe counts one further step. Its counts are multiplied by what the formula says of the measured steps over what it
    says of the probed one. Utilisation is that of the median step, each timed against its own FLOPs.

    All ranks must call it together, since formulas may ask which optional parts any rank has.

    Args:
        policy: as in `probed_flops`.
        outlines: of the micro-batches of the measured steps, in their order.
    """
    if policy is None:
        return _unknown_flops(_NO_FORMULA, None, _NO_COST), unknown_utilisation(_NO_FORMULA)
    if not step_time_s:
        return _unknown_flops(_NO_STEP, None, _NO_STEP), unknown_utilisation(_NO_STEP)
    probed_cost = total_cost(_step_cost(policy, _moved_to(device, probed.micro_batches)))
    accumulation = len(outlines) // len(step_time_s)
    steps = [
        _step_cost(policy, (outline.batch(device) for outline in outlines[start : start + accumulation]))
        for start in range(0, len(outlines), accumulation)
    ]
    towers = {name: _mean_cost([step.get(name, Cost()) for step in steps]) for step in steps for name in step}
    mean, models = total_cost(towers), [total_cost(step).model for step in steps]
    counted, reason = probed.flops, probed.flops["reason"]
    model = _scaled(counted["model_flops_per_step"], mean.model, probed_cost.model)
    recomputed = _scaled(counted.get("recomputed_flops_per_step"), mean.recomputed, probed_cost.recomputed)
    if model is None or recomputed is None or not all(models):
        reason = reason or _NOT_SCALABLE
        return _unknown_flops(reason, _tower_flops(towers), None), unknown_utilisation(reason)
    flops: Flops = {
        "model_flops_per_step": model,
        "recomputed_flops_per_step": recomputed,
        "reason": None,
        "per_tower": _tower_flops(towers),
        "per_tower_reason": None,
    }
    shares = [step / mean.model for step in models]
    times_s = [time / share for time, share in zip(step_time_s, shares, strict=True)]
    return flops, replace(probed, flops=flops).utilisation(times_s)


def _unknown_flops(reason: str, towers: dict[str, TowerFlops] | None, towers_reason: str | None) -> Flops:
    return {
        "model_flops_per_step": None,
        "recomputed_flops_per_step": None,
        "reason": reason,
        "per_tower": towers,
        "per_tower_reason": towers_reason,
    }


def _moved_to(device: torch.device, batches: Iterable[Batch]) -> Iterable[Batch]:
    return ({name: tensor.to(device) for name, tensor in batch.items()} for batch in batches)


def _step_cost(policy: Policy, batches: Iterable[Batch]) -> dict[str, Cost]:
    return sum_costs(training_cost(policy.work(batch)) for batch in batches)


def _tower_flops(costs: Mapping[str, Cost]) -> dict[str, TowerFlops]:
    return {
        tower: {"forward": cost.forward, "backward": cost.backward, "recomputed": cost.recomputed}
        for tower, cost in costs.items()
    }


def _mean_cost(costs: Sequence[Cost]) -> Cost:
    return Cost(
        forward=round(fmean(cost.forward for cost in costs)),
        backward=round(fmean(cost.backward for cost in costs)),
        recomputed=round(fmean(cost.recomputed for cost in costs)),
    )


def _scaled(counted: int | None, mean: int, probed: int) -> int | None:
    """Return a count of the probed step for the mean step, by the formula of both; None where the formula does not say."""
    if counted is None:
        return None
    if not probed:
        return 0 if counted == mean == 0 else None
    return round(counted * mean / probed)
