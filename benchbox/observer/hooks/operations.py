"""Watching every operation of one step: collectives and matrix products."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .collectives import CollectiveCounter
from .dispatch import OperationDispatchMode
from .matmuls import MatmulDtypes

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_SEEN = "no step was watched operation by operation"


class OperationWatch:
    """Entered inside one step and left inside the next, so that the whole course between them is seen.

    `missing` is the reason why nothing was seen, None once it was.
    """

    def __init__(self) -> None:
        self.collectives, self.products = CollectiveCounter(), MatmulDtypes()
        self.missing: str | None = NOT_SEEN
        self._watch: OperationDispatchMode | None = None

    def enter(self) -> None:
        if self._watch is not None or self.missing != NOT_SEEN:
            return
        if (objection := _objection()) is not None:
            self.missing = objection
            return
        self._watch = OperationDispatchMode(self.collectives, self.products)
        self._watch.__enter__()

    def leave(self) -> None:
        """Leave, or if the program is inside a mode that it entered after ours, do so when next asked to."""
        if self._watch is None:
            return
        if _get_current_dispatch_mode() is not self._watch:
            self.missing = "the training entered a dispatch mode of its own while operations were watched"
            return
        self._watch.__exit__(None, None, None)
        self._watch = None
        if self.missing == NOT_SEEN:
            self.missing = None


def _objection() -> str | None:
    """Why operations of this process must not be watched: it would change what runs, or make it fail."""
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is not None and utilities.counters["stats"].get("unique_graphs"):
        # A dispatch mode would make compiled regions run uncompiled, which may change the last bits of results.
        return "the training compiles its model: watching single operations would change what runs"
    if _get_current_dispatch_mode() is not None:
        # It will be left before ours, and modes can only be left in reverse.
        return "the training steps its optimizer inside a dispatch mode of its own"
    if not _casts_to_subclasses() and (names := sorted(_subclasses(torch.Tensor))):
        return f"under torch {torch.__version__} watching operations breaks subclasses of Tensor ({names[0]})"
    return None


class _Cast(torch.Tensor):
    pass


def _casts_to_subclasses() -> bool:
    """Whether a tensor can be turned into one of a subclass while operations are watched; torch 2.4 cannot."""
    with OperationDispatchMode():
        try:
            torch.zeros(()).as_subclass(_Cast)
        except RuntimeError:
            return False
    return True


def _subclasses(kind: type[Any]) -> Iterator[str]:
    """Names of the subclasses of Tensor that are not torch's own."""
    for each in kind.__subclasses__():
        if each is not _Cast and not each.__module__.startswith("torch."):
            yield each.__qualname__
        yield from _subclasses(each)
