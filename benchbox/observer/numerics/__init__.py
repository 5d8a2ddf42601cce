"""Numerics of a step: the expected update, traces of rounding, tensor probes, the tensor census."""
