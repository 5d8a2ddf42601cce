"""Predictions from formulas, without a run."""
