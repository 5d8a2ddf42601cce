"""Supervision of a process group: events, stacks, root causes, outcomes."""
