"""Training: the same step as everywhere, with metrics and checkpoints around it."""
