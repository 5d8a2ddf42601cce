"""Suggestions for unknown names."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


_MOST_LISTED = 20


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return the hint that follows "unknown X": the nearest candidate, or all when they are few, or nothing."""
    names = sorted(map(str, candidates))  # a preset may be called 7
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if names and len(names) <= _MOST_LISTED:
        return "one of " + ", ".join(names)
    return ""
