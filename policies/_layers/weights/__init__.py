"""Published weights: reading them and mapping their names."""
