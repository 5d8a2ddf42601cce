"""Processes of a launch: launchers, torchrun, user commands, signals, the terminal, environment variables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchbox.launch.job import Launcher


def make_launcher(name: str) -> Launcher:
    """Return the launcher `local`, whose launches are warm where processes can be forked safely, or `torchrun`."""
    if name == "torchrun" or sys.platform != "linux":
        from benchbox.launch.process.cold import TorchrunLauncher

        return TorchrunLauncher()
    from benchbox.launch.process.warm import ForkServerLauncher

    return ForkServerLauncher()
