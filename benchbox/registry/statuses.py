"""Statuses of a launch, in order of severity. A wrong measurement (mismatch) is worse than none."""

from __future__ import annotations

STATUSES = ("ok", "interrupted", "unsupported", "timeout", "hang", "oom", "nan", "desync", "crash", "mismatch")

# Status of a cell whose launches all ended ok, but trained differently from its reference. No launch record has it: a launch
# does not know the others.
DIVERGED = "diverged"
