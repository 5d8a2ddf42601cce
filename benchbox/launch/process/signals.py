"""Handling the signals that ask a process to stop, so that a run ends in a defined state."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handle_stop_signals(handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler` with the number of every SIGINT, SIGTERM and SIGHUP inside the block, instead of raising or ending.

    A signal that is ignored on entry (`nohup`) stays ignored. Must be entered in the main thread.
    """
    previous = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    handled = [number for number in _STOP_SIGNALS if previous[number] is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, lambda number, _: handler(number))
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, previous[number])


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a stop signal arrived inside the block, see `handle_stop_signals`."""
    received: list[int] = []
    with handle_stop_signals(received.append):
        yield lambda: bool(received)
