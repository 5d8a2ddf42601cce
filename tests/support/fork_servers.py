"""Fork servers that all tests share, so that only these processes import torch instead of every launch."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.launch.process.environment import rank_environment
from benchbox.launch.process.warm import SHARED_SERVERS_VARIABLE, ForkServerLauncher

if TYPE_CHECKING:
    from collections.abc import Sequence


class SharedForkServers:
    """Servers for groups of one rank and of several, which differ in their number of threads unless OMP_NUM_THREADS sets it.

    The folder of their sockets is in the environment from the beginning, so that workers of pytest-xdist inherit it.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="benchbox-servers-"))
        os.environ[SHARED_SERVERS_VARIABLE] = str(self._folder)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the servers once. They import in the background, and a client that connects meanwhile waits."""
        if self._processes:
            return
        sizes = (2,) if "OMP_NUM_THREADS" in os.environ else (2, 1)
        for ranks in sizes:
            socket_file, log = self._folder / f"{ranks}.sock", self._folder / f"{ranks}.log"
            self._processes.append(start_shared_server(socket_file, ranks=ranks, log=log))

    def close(self) -> None:
        """End the servers and all that they forked."""
        del os.environ[SHARED_SERVERS_VARIABLE]
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder)


def start_shared_server(socket_file: Path, *, ranks: int, log: Path, preload: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a fork server for groups of `ranks` ranks that listens at once, and serves when it has imported."""
    variables = rank_environment(os.environ, ForkServerLauncher().variables(ranks))
    with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as output:
        listener.bind(str(socket_file))
        listener.listen()
        return subprocess.Popen(
            [sys.executable, "-m", "benchbox.worker.fork_server", str(listener.fileno()), *preload],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=variables,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
