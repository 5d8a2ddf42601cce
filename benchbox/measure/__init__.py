"""Instruments of a benchmark: phases, memory, FLOPs, kernels, environment."""
