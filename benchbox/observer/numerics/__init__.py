"""Numbers of a step: the expected update, traces of rounding, tensor probes, the census."""
