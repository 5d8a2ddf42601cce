"""Signals that ask a rank to stop: SIGTERM ends it at once, or after the step that runs if it trains, as SIGUSR1 does.

A thread waits for them, because the main thread may be in a collective that never returns to Python.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.store.events import EventWriter


# Process id of the launcher on this machine, in the environment of every rank.
LAUNCHER_VARIABLE = "BENCHBOX_LAUNCHER"


class StopSignals:
    """Receiver of SIGTERM and SIGUSR1 of this process.

    Without `defer` SIGTERM writes the event `terminated` and ends the process: without the event this rank would look like one
    that was killed. While deferring, both signals only set `requested`, and a SIGTERM after another signal ends the process,
    unless that was the launcher's: a batch system may signal both, and the launcher then asks before the system's reaches this
    process. A SIGTERM of this rank's parent or of the launcher always ends it: they send one when another rank failed or the
    user does not want to wait.

    Must be created in the main thread, before any other thread is started.

    Args:
        launcher: process id of the launcher, None if unknown.
        handles_usr1: whether the job can stop after a step. Other ranks inherit that SIGUSR1 is ignored.
        before_end: called before a SIGTERM ends the process.
    """

    def __init__(
        self,
        events: EventWriter,
        *,
        launcher: int | None = None,
        handles_usr1: bool = False,
        before_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.requested: str | None = None  # name of the first signal that asked to stop
        self.deferred = False
        self._events = events
        self._before_end = before_end
        self._launcher = launcher
        self._parent = os.getppid()
        numbers = {signal.SIGTERM, signal.SIGUSR1} if handles_usr1 else {signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        threading.Thread(target=self._wait, args=(numbers,), name="stop-signals", daemon=True).start()

    def defer(self) -> None:
        """Let signals ask from now on, for a job that will read `requested`."""
        self.deferred = True

    def _wait(self, numbers: set[signal.Signals]) -> None:
        asked_before = False
        while True:
            number, sender = _wait_for_signal(numbers)
            ends = not self.deferred or asked_before or sender in (self._parent, self._launcher)
            if number == signal.SIGTERM and ends:
                self._before_end()
                with suppress(OSError):  # of a full disk
                    self._events.write("terminated", signal=number.name)
                os._exit(128 + number)
            asked_before |= sender != self._launcher
            self.requested = self.requested or number.name


def _wait_for_signal(numbers: set[signal.Signals]) -> tuple[signal.Signals, int | None]:
    """Return the signal that arrived, and the process id of its sender where the system tells it."""
    if hasattr(signal, "sigwaitinfo"):
        received = signal.sigwaitinfo(numbers)
        return signal.Signals(received.si_signo), received.si_pid
    return signal.Signals(signal.sigwait(numbers)), None  # macOS
