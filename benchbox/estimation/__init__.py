"""Estimates of a cell before it runs: a step of the policy is traced, and `benchbox.theory` computes the rest."""

from benchbox.estimation.estimate import Estimator, estimate

__all__ = ["Estimator", "estimate"]
