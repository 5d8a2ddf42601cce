"""Closed loop: a policy of a checkpoint acts in simulated environments, and its success rate is measured."""
