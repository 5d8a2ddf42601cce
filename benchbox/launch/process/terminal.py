"""Lending the terminal to a child in a process group of its own, as a shell with job control does.

A group that is not in the foreground is stopped when it reads the keyboard, and Ctrl-C does not reach it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class Terminal:
    """Within, the terminal of our stdin, if there is one and it was ours, belongs to the group of a child.

    Args:
        child: its process id, which is also that of its group.
    """

    def __init__(self, child: int) -> None:
        self._child = child
        self._stdin = sys.__stdin__.fileno() if sys.__stdin__ and sys.__stdin__.isatty() else None

    def __enter__(self) -> Self:
        self._hand_over(os.getpgrp(), self._child)
        self._wake()  # it may have asked for the keyboard too early
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._hand_over(self._child, os.getpgrp())

    def follow(self) -> None:
        """Once the child was stopped by Ctrl-Z, stop as well, so that the shell comes back; wake it when we are woken."""
        if self._stdin is None or os.waitid(os.P_PID, self._child, os.WSTOPPED | os.WNOHANG) is None:
            return
        self._hand_over(self._child, os.getpgrp())
        signal.raise_signal(signal.SIGTSTP)
        self._hand_over(os.getpgrp(), self._child)
        self._wake()

    def _hand_over(self, giver: int, taker: int) -> None:
        if self._stdin is None:
            return
        # Whoever is in the background is stopped for changing this, unless it does not care to be told.
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            if os.tcgetpgrp(self._stdin) == giver:
                os.tcsetpgrp(self._stdin, taker)
        except OSError:
            pass  # the child has ended, or the terminal is not the one we were started from
        finally:
            signal.signal(signal.SIGTTOU, before)

    def _wake(self) -> None:
        if self._stdin is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child, signal.SIGCONT)
