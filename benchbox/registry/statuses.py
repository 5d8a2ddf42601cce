"""Statuses of a launch, in order of severity. A wrong measurement (mismatch) is worse than none."""

from __future__ import annotations

STATUSES = ("ok", "interrupted", "unsupported", "timeout", "hang", "oom", "nan", "desync", "crash", "mismatch")
