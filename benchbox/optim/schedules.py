"""Learning-rate schedules, built on the optimizer and advanced once per optimizer step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from benchbox.spec.cell import OptimSpec


def _constant(optim: OptimSpec, peak: float) -> Callable[[int], float]:  # noqa: ARG001 (all schedules have the same signature)
    return lambda step: 1.0  # noqa: ARG005


def _warmup_constant(optim: OptimSpec, peak: float) -> Callable[[int], float]:  # noqa: ARG001
    return lambda step: min(1.0, (step + 1) / (optim.warmup_steps + 1))


def _warmup_cosine(optim: OptimSpec, peak: float) -> Callable[[int], float]:
    floor = min(1.0, optim.final_lr / peak)

    def factor(step: int) -> float:
        if step < optim.warmup_steps:
            return (step + 1) / (optim.warmup_steps + 1)
        progress = min(1.0, (step - optim.warmup_steps) / max(1, optim.total_steps - optim.warmup_steps))
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


SCHEDULES: dict[str, Callable[[OptimSpec, float], Callable[[int], float]]] = {
    "constant": _constant,
    "warmup_constant": _warmup_constant,
    "warmup_cosine": _warmup_cosine,
}


def build_schedule(optimizer: Optimizer, optim: OptimSpec) -> LambdaLR:
    """Build the schedule named in `optim`, which scales the peak learning rate of each group.

    `final_lr` is the absolute floor of the cosine. Step k uses the learning rate of step k: the schedule is advanced after the
    step.

    Raises:
        ConfigurationError: the schedule is unknown.
    """
    if optim.schedule not in SCHEDULES:
        hint = did_you_mean(optim.schedule, SCHEDULES)
        raise ConfigurationError(Problem("optim.schedule", f"unknown schedule {optim.schedule!r}", hint))
    build_factor = SCHEDULES[optim.schedule]
    return LambdaLR(optimizer, [build_factor(optim, float(group["lr"])) for group in optimizer.param_groups])
