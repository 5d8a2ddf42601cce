"""FLOPs of the measured steps of a rank, from those of the probed one where all have the same shapes, else by formula."""

from __future__ import annotations

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


def probed_flops(
    policy: Policy | None, probed: ProbeResult, step_time_s: Sequence[float], device: torch.device
) -> tuple[Flops, Utilisation]:
    """Return the FLOPs of the probed step, and the utilisation of measured steps that have the same shapes.

    Args:
        policy: not sharded, because formulas need the full sizes of its layers; None if it declares no cost.
        step_time_s: of the measured steps.
    """
    towers = None if policy is None else _tower_flops(_step_cost(policy, _on(device, probed.micro_batches)))
    reason = None if policy else _NO_COST
    return {**probed.flops, "per_tower": towers, "per_tower_reason": reason}, probed.utilisation(step_time_s)


def mean_flops(
    policy: Policy | None,
    probed: ProbeResult,
    outlines: Sequence[BatchOutline],
    step_time_s: Sequence[float],
    device: torch.device,
) -> tuple[Flops, Utilisation]:
    """Return the mean FLOPs of measured steps whose batches differ in shape, and the utilisation.

    The probe counts one further step. Its counts are multiplied by what the formula says of the measured steps over what it
    says of the probed one. Utilisation is that of the median step, each timed against its own FLOPs.

    All ranks must call it together, since formulas may ask which optional parts any rank has.

    Args:
        policy: as in `probed_flops`.
        outlines: of the micro-batches of the measured steps, in their order.
    """
    if policy is None:
        flops: Flops = {
            "model_flops_per_step": None,
            "recomputed_flops_per_step": None,
            "reason": _NO_FORMULA,
            "per_tower": None,
            "per_tower_reason": _NO_COST,
        }
        return flops, unknown_utilisation(_NO_FORMULA)
    probed_cost = total_cost(_step_cost(policy, _on(device, probed.micro_batches)))
    accumulation = len(outlines) // len(step_time_s)
    steps = [
        _step_cost(policy, (outline.batch(device) for outline in outlines[start : start + accumulation]))
        for start in range(0, len(outlines), accumulation)
    ]
    towers = {name: _mean_cost([step.get(name, Cost()) for step in steps]) for step in steps for name in step}
    mean = total_cost(towers)
    flops = {
        "model_flops_per_step": _scaled(probed.flops["model_flops_per_step"], mean.model, probed_cost.model),
        "recomputed_flops_per_step": _scaled(
            probed.flops.get("recomputed_flops_per_step"), mean.recomputed, probed_cost.recomputed
        ),
        "reason": probed.flops["reason"],
        "per_tower": _tower_flops(towers),
        "per_tower_reason": None,
    }
    shares = [total_cost(step).model / mean.model for step in steps]
    return flops, probed.with_flops(flops).utilisation([time / share for time, share in zip(step_time_s, shares, strict=True)])


def _on(device: torch.device, batches: Iterable[Batch]) -> Iterable[Batch]:
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
    """Return a count of the probed step for the mean step, by the formula of both; it may say that there is nothing."""
    return counted if counted is None or not probed else round(counted * mean / probed)
