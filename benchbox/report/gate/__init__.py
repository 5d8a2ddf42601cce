"""Verdicts of `benchbox check`, for people and for programs: one module for each format."""
