"""Comparisons of the policies with the peers' own packages, or with formulas of `tests/reference` where there is no package."""
