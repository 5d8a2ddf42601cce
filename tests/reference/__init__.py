"""Formulas of other projects, written from their papers and documented facts, for comparison with benchbox's policies."""
