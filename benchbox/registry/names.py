"""Looking a name up, and saying what was probably meant when it is not there."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint that follows "unknown X": the nearest known name, or the list when it is short, or nothing."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if names and len(names) <= 16:
        return "one of " + ", ".join(names)
    return ""
