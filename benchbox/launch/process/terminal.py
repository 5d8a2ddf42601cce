"""Lending the terminal to a child in a process group of its own, as a shell with job control does.

A process group in the background is stopped when it reads the keyboard, and Ctrl-C does not reach it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class ForegroundTerminal:
    """Context manager inside which the process group of a child is the foreground group of the terminal.

    Without effect where stdin is no terminal, or where this process is in the background itself.

    Args:
        child: process id of the child, which is also the id of its process group.
    """

    def __init__(self, child: int) -> None:
        self._child = child
        self._stdin = sys.__stdin__.fileno() if sys.__stdin__ and sys.__stdin__.isatty() else None

    def __enter__(self) -> Self:
        self._change_foreground(os.getpgrp(), self._child)
        self._resume_child()  # it may have read the keyboard too early and been stopped
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._change_foreground(self._child, os.getpgrp())

    def follow_suspension(self) -> None:
        """Suspend this process once Ctrl-Z suspended the child, so that the shell comes back; resume the child afterwards."""
        if self._stdin is None or os.waitid(os.P_PID, self._child, os.WSTOPPED | os.WNOHANG) is None:
            return
        self._change_foreground(self._child, os.getpgrp())
        signal.raise_signal(signal.SIGTSTP)
        self._change_foreground(os.getpgrp(), self._child)
        self._resume_child()

    def _change_foreground(self, current: int, new: int) -> None:
        """Make `new` the foreground process group, unless another group than `current` is."""
        if self._stdin is None:
            return
        # The kernel stops a background process that changes the foreground group, unless it ignores SIGTTOU.
        previous = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            if os.tcgetpgrp(self._stdin) == current:
                os.tcsetpgrp(self._stdin, new)
        except OSError:
            pass  # the child has ended, or stdin is not our controlling terminal
        finally:
            signal.signal(signal.SIGTTOU, previous)

    def _resume_child(self) -> None:
        if self._stdin is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child, signal.SIGCONT)
