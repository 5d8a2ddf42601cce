"""Estimates of a cell before it runs: the policy is traced on fake tensors, and `benchbox.theory` computes the rest."""

from benchbox.estimation.estimate import Estimator, estimate

__all__ = ["Estimator", "estimate"]
