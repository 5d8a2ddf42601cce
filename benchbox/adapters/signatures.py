"""Signatures of the functions that a user gives to `benchbox.adapt`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with this number of positional arguments; False for built-in ones."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):  # built-in functions have no signature
        return False
    return True
