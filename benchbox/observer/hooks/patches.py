"""Wrappers around torch's functions, which are removed again."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from .tracing import TraceWatch, note_traced_call

if TYPE_CHECKING:
    from collections.abc import Callable


class FunctionPatches:
    """Functions replaced by wrappers. A wrapper calls `around(original, *args, **kwargs)` and returns its result."""

    def __init__(self) -> None:
        self._patches: list[tuple[Any, str, Any]] = []
        self._is_active = True
        self._compiled = TraceWatch("call")

    def patch(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a function of a module or class."""
        original = vars(owner)[name]

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                note_traced_call()
                return original(*args, **kwargs)
            return around(original, *args, **kwargs) if self._is_active else original(*args, **kwargs)

        wrapper.__wrapped__ = original
        setattr(owner, name, wrapper)
        self._patches.append((owner, name, wrapper))

    def has(self, owner: Any) -> bool:
        """Return whether a function of this owner is replaced."""
        return any(patched is owner for patched, _, _ in self._patches)

    def remove(self) -> None:
        """Restore the originals, except where other code has replaced them meanwhile, or compiled a call of them."""
        self._is_active = False
        for owner, name, wrapper in reversed(self._patches):
            if vars(owner).get(name) is wrapper and not self._compiled:
                setattr(owner, name, wrapper.__wrapped__)
        self._patches.clear()
