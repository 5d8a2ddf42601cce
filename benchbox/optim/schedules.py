"""Learning-rate schedules, built on the optimizer and advanced once per optimizer step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from benchbox.optim.groups import GroupPlan
    from benchbox.spec.optim import OptimSpec


def _constant(optim: OptimSpec, floor: float) -> Callable[[int], float]:  # noqa: ARG001 (all schedules have the same signature)
    return lambda step: 1.0  # noqa: ARG005


def _warmup_constant(optim: OptimSpec, floor: float) -> Callable[[int], float]:  # noqa: ARG001
    return lambda step: _warmup(step, optim.warmup_steps)


def _warmup_cosine(optim: OptimSpec, floor: float) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step < optim.warmup_steps:
            return _warmup(step, optim.warmup_steps)
        progress = _progress(step, optim.warmup_steps, optim.total_steps)
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def _wsd(optim: OptimSpec, floor: float) -> Callable[[int], float]:
    """Warm-up, stable, decay; the decay is linear or 1 - sqrt(progress) (Haegele et al., arXiv:2405.18392, eq. 1)."""

    def factor(step: int) -> float:
        if step < optim.decay_start:
            return _warmup(step, optim.warmup_steps)
        progress = _progress(step, optim.decay_start, optim.total_steps)
        remaining = 1.0 - (progress if optim.decay_shape == "linear" else math.sqrt(progress))
        return floor + (1.0 - floor) * remaining

    return factor


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _progress(step: int, start: int, end: int) -> float:
    return min(1.0, (step - start) / max(1, end - start))


SCHEDULES: dict[str, Callable[[OptimSpec, float], Callable[[int], float]]] = {
    "constant": _constant,
    "warmup_constant": _warmup_constant,
    "warmup_cosine": _warmup_cosine,
    "wsd": _wsd,
}


def rate_factor(optim: OptimSpec, peak: float, freeze_steps: int = 0) -> Callable[[int], float]:
    """Return the function from step to the factor of a group's peak learning rate.

    `final_lr` is the absolute floor of a decay. A group that is frozen at first has factor 0 until it trains; then the factor
    at the same step of any other group, times a warm-up of `thaw_warmup_steps`.

    Raises:
        ConfigurationError: the schedule is unknown.
    """
    if optim.schedule not in SCHEDULES:
        hint = did_you_mean(optim.schedule, SCHEDULES)
        raise ConfigurationError(Problem("optim.schedule", f"unknown schedule {optim.schedule!r}", hint))
    factor = SCHEDULES[optim.schedule](optim, min(1.0, optim.final_lr / peak) if peak > 0 else 1.0)
    if not freeze_steps:
        return factor
    return lambda step: 0.0 if step < freeze_steps else factor(step) * _warmup(step - freeze_steps, optim.thaw_warmup_steps)


class StepSchedule(LambdaLR):
    """Schedule of the learning rates of parameter groups, advanced once per optimizer step.

    Step k uses the learning rate of step k: the schedule is advanced after the step. `step_count` is k.
    """

    def __init__(self, optimizer: Optimizer, factors: Sequence[Callable[[int], float]]) -> None:
        super().__init__(optimizer, list(factors))
        # An optimizer may keep its rates in tensors, and torch then its peaks too. Their products are rounded otherwise than
        # those of the numbers that a checkpoint has.
        self.base_lrs = [float(peak) for peak in self.base_lrs]
        self._set_rates()

    @property
    def step_count(self) -> int:
        """Number of optimizer steps since the start of training, those before a checkpoint included."""
        return int(self.last_epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the step of a state dict, whatever learning rates the groups have now."""
        super().load_state_dict(state_dict)
        self._set_rates()

    def _set_rates(self) -> None:
        for group, factor, peak in zip(self.optimizer.param_groups, self.lr_lambdas, self.base_lrs, strict=True):
            rate = peak * factor(self.last_epoch)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def build_schedule(optimizer: Optimizer, optim: OptimSpec, plans: Sequence[GroupPlan] | None = None) -> StepSchedule:
    """Build the schedule named in `optim`, which scales the peak learning rate of each group.

    Args:
        plans: the plans of the optimizer's groups, in order; without them no group is frozen.

    Raises:
        ConfigurationError: the schedule is unknown.
    """
    frozen = [0] * len(optimizer.param_groups) if plans is None else [plan.freeze_steps for plan in plans]
    pairs = zip(optimizer.param_groups, frozen, strict=True)
    return StepSchedule(optimizer, [rate_factor(optim, float(group["lr"]), steps) for group, steps in pairs])
