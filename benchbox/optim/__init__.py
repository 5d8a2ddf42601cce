"""Frozen parameters, parameter groups, float32 masters, gradient norms, averages of weights, and schedules."""

from benchbox.optim.averages import WeightAverages
from benchbox.optim.groups import GroupPlan, bind_groups, freeze, plan_groups
from benchbox.optim.masters import MasterWeightOptimizer
from benchbox.optim.norm import clip_coefficient, scale_gradients, squared_norm
from benchbox.optim.schedules import StepSchedule, build_schedule, rate_factor
from benchbox.optim.spikes import SpikeGuard

__all__ = [
    "GroupPlan",
    "MasterWeightOptimizer",
    "SpikeGuard",
    "StepSchedule",
    "WeightAverages",
    "bind_groups",
    "build_schedule",
    "clip_coefficient",
    "freeze",
    "plan_groups",
    "rate_factor",
    "scale_gradients",
    "squared_norm",
]
