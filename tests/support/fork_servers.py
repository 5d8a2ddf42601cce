"""Fork servers that all tests share, so that only two processes import torch instead of every launch."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from benchbox.launch.process.environment import host_variables
from benchbox.launch.process.warm import SHARED_SERVERS_VARIABLE, ForkServerLauncher


class SharedForkServers:
    """Servers for groups of one rank and of several, which differ in their number of threads.

    They import in the background, and a client that connects meanwhile waits.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="benchbox-servers-"))
        os.environ[SHARED_SERVERS_VARIABLE] = str(self._folder)
        self._processes = [self._start(ranks) for ranks in (2, 1)]

    def _start(self, ranks: int) -> subprocess.Popen[bytes]:
        variables = {**os.environ, **host_variables(os.environ), **ForkServerLauncher().variables(ranks)}
        with socket.socket(socket.AF_UNIX) as listener, (self._folder / f"{ranks}.log").open("wb") as log:
            listener.bind(str(self._folder / f"{ranks}.sock"))
            listener.listen()
            return subprocess.Popen(
                [sys.executable, "-m", "benchbox.worker.fork_server", str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        """End the servers and all that they forked."""
        del os.environ[SHARED_SERVERS_VARIABLE]
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder)
