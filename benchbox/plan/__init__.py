"""Matrix -> cells to launch: what can run, what cannot and why, and in which order."""

from benchbox.plan.only import join_expressions, select
from benchbox.plan.planning import Plan, Skip, launches, plan, rounds

__all__ = ["Plan", "Skip", "join_expressions", "launches", "plan", "rounds", "select"]
