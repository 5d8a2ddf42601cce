"""Handling the signals that ask a process to stop, so that a run ends in a defined state."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handle_stop_signals(handler: Callable[[int], None], signals: Sequence[signal.Signals] = _STOP_SIGNALS) -> Iterator[None]:
    """Call `handler` with the number of every SIGINT, SIGTERM and SIGHUP inside the block, instead of raising or ending.

    `signals` names others. A signal that is ignored on entry (`nohup`) stays ignored. Must be entered in the main thread.
    """
    previous = {number: signal.getsignal(number) for number in signals}
    handled = [number for number in signals if previous[number] is not signal.SIG_IGN]
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


@contextmanager
def collect_stop_signals() -> Iterator[list[str]]:
    """Yield a list that gets the name of every signal that asks a training to stop: also SIGUSR1, which Slurm can send."""
    received: list[str] = []
    with handle_stop_signals(lambda number: received.append(signal.Signals(number).name), (*_STOP_SIGNALS, signal.SIGUSR1)):
        yield received
