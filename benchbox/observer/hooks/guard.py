"""Guard of what the observer does inside the training's own calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class FailureGuard:
    """Context in which an exception is reported and goes no further: the training's call returns as without the observer."""

    def __init__(self) -> None:
        self.report: Callable[[Exception], None] = lambda _: None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.report(error)
        return True
