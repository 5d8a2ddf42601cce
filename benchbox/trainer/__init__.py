"""Training: the loop around the common step, metrics and checkpoints."""
