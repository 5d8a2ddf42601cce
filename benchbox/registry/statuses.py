"""How a launch can end."""

from __future__ import annotations

STATUSES = ("ok", "oom", "timeout", "hang", "desync", "nan", "crash", "mismatch", "unsupported", "interrupted")
