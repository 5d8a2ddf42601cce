"""Ties a process to the life of its parent."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def signal_on_parent_death(number: signal.Signals) -> None:
    """Ask Linux to send this process a signal when its parent dies, even by SIGKILL. Do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
