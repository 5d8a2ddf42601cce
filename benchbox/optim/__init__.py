"""Frozen parameters, parameter groups, float32 masters, the gradient norm and learning-rate schedules."""

from benchbox.optim.groups import GroupPlan, bind_groups, freeze, plan_groups
from benchbox.optim.masters import MasterWeightOptimizer
from benchbox.optim.norm import clip_coefficient, scale_gradients, squared_norm
from benchbox.optim.schedules import build_schedule

__all__ = [
    "GroupPlan",
    "MasterWeightOptimizer",
    "bind_groups",
    "build_schedule",
    "clip_coefficient",
    "freeze",
    "plan_groups",
    "scale_gradients",
    "squared_norm",
]
