"""Counts of floating-point operations by formula."""
