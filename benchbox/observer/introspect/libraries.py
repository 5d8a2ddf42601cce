"""Training libraries, recognised by the calls that lead to an optimizer's step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_LIBRARIES = {"pytorch_lightning": "lightning"} | {
    name: name for name in ("accelerate", "deepspeed", "lerobot", "lightning", "transformers")
}


def calling_libraries() -> tuple[str, ...]:
    """Return the training libraries among the callers of this function, the innermost first."""
    found: dict[str, None] = {}
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (`inspect` reads every source file)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _LIBRARIES:
            found[_LIBRARIES[package]] = None
        frame = frame.f_back
    return tuple(found)
