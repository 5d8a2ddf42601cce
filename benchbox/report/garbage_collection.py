"""A pause of Python's garbage collector while a report is made."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Keep the collector from searching for cycles. Use it as a decorator of a function whose objects form none.

    Records and the view of a large run are millions of objects that all live until the report is written: to search them again
    and again took a third of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
