"""Published weights: loading and mapping of names."""
