"""Stopping in order: a signal asks, and the run stops where nothing is left half done."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C and a polite kill do not raise: the function handed out says whether one came.

    A signal that is ignored on entry (`nohup`) stays ignored. To be entered in the main thread.
    """
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        for number in taken:
            signal.signal(number, before[number])
