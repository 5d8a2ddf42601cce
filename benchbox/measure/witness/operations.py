"""Watching every operation of one step: collectives and matrix products."""

from __future__ import annotations

import sys

from .collectives import CollectiveCounter
from .products import ProductDtypes
from .watch import Watch

NOT_SEEN = "no step was watched operation by operation"


class OperationWatch:
    """Entered inside one step and left inside the next, so that the whole course between them is seen.

    `missing` is the reason why nothing was seen, None once it was.
    """

    def __init__(self) -> None:
        self.collectives, self.products = CollectiveCounter(), ProductDtypes()
        self.missing: str | None = NOT_SEEN
        self._watch: Watch | None = None

    def enter(self) -> None:
        if self._watch is not None or self.missing != NOT_SEEN:
            return
        if _compiles():
            # A dispatch mode would make compiled regions run uncompiled, which may change the last bits of results.
            self.missing = "the training compiles its model: watching single operations would change what runs"
            return
        self._watch = Watch(self.collectives, self.products)
        self._watch.__enter__()

    def leave(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
            self.missing = None


def _compiles() -> bool:
    utilities = sys.modules.get("torch._dynamo.utils")
    return bool(utilities is not None and utilities.counters["stats"].get("unique_graphs"))
