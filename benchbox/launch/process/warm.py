"""Launcher for this machine whose groups are forked from a server that has imported all libraries once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchbox.errors import BenchboxError
from benchbox.launch.job import Job, Launcher, RankExit, RankGroup, read_rank_exits
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.process.environment import fork_server_variables, group_variables, import_environment, rank_environment
from benchbox.launch.process.processes import JOB_VARIABLE, end_processes, signal_processes
from benchbox.worker.stop_signals import LAUNCHER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.worker.fork_server import ServerGreeting

SHARED_SERVERS_VARIABLE = "BENCHBOX_FORK_SERVERS"
_SERVER_LOST = -signal.SIGKILL


class ForkServerLauncher(Launcher):
    """Forks every job from a server process that has only imported (`benchbox.worker.fork_server`).

    Libraries read some environment variables when they are imported, so each distinct environment has a server of its own,
    started when it is first needed. A server that was killed is replaced at the next job.

    Servers end together with this process. Those of other processes are used as well: if the variable `BENCHBOX_FORK_SERVERS`
    names a folder, its files `*.sock` are sockets of shared servers, and one that imported in the same environment is taken.
    """

    name = "fork_server"

    def __init__(self, *, worker_module: str = "benchbox.worker", preload: Sequence[str] = (), grace_s: float = 5.0) -> None:
        """Create a launcher; servers start with the first job.

        Args:
            worker_module: run by every rank.
            preload: modules that servers import, instead of all that `benchbox.worker` needs.
            grace_s: seconds that ranks get to end after SIGTERM, before SIGKILL.
        """
        self._preload = tuple(preload)
        self._worker_module = worker_module
        self._grace_s = grace_s
        self._servers: dict[frozenset[tuple[str, str]], _Server] = {}
        self._cold: TorchrunLauncher | None = None  # once a server could not start

    def variables(self, ranks: int) -> dict[str, str]:
        if self._cold is not None:
            return self._cold.variables(ranks)
        return group_variables(ranks, os.environ) | fork_server_variables(os.environ)

    def start(self, job: Job) -> RankGroup:
        if self._cold is not None:
            return self._cold.start(job)
        environment = rank_environment(os.environ, self.variables(job.ranks))
        try:
            server = self._server(environment)
        except _ServerStartError as error:
            print(f"warning: every launch starts new interpreters, which takes longer: {error}", file=sys.stderr)
            self._cold = TorchrunLauncher(worker_module=self._worker_module, grace_s=self._grace_s)
            self.name = self._cold.name
            return self._cold.start(job)
        exits = job.exits.resolve()
        leader = server.fork(
            {
                "module": self._worker_module,
                "job_file": str(job.file.resolve()),
                "ranks": job.ranks,
                "environment": {**environment, JOB_VARIABLE: job.job_id, LAUNCHER_VARIABLE: str(os.getpid())},
                "folder": os.getcwd(),  # noqa: PTH109 (a string for the request)
                "log": str(job.group_log.resolve()),
                "exits": str(exits),
            }
        )
        return _ForkedGroup(server, leader, job.job_id, exits, self._grace_s)

    def close(self) -> None:
        """End the servers. Without this call they end together with this process."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def _server(self, environment: Mapping[str, str]) -> _Server:
        key = frozenset(import_environment(environment).items())
        server = self._servers.get(key)
        if server is not None and not server.alive:
            server.close()
            server = None
        if server is None:
            shared = None if self._preload else _connect(environment)
            server = self._servers[key] = shared or _OwnServer(environment, self._preload)
        return server


def _connect(environment: Mapping[str, str]) -> _Server | None:
    """Return a shared server that imported in this environment, or None."""
    folder = environment.get(SHARED_SERVERS_VARIABLE)
    for path in sorted(Path(folder).glob("*.sock")) if folder else ():
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError:  # it has ended
            connection.close()
            continue
        server = _Server(connection)
        imported = server.greeting and import_environment(server.greeting["environment"])
        if server.greeting and server.greeting["prefix"] == sys.prefix and imported == import_environment(environment):
            return server
        server.close()
    return None


class _Server:
    """A connection to a running fork server, and the requests to it. `greeting` is None if the server could not start."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._channel = connection.makefile("rw")
        self.greeting = cast("ServerGreeting | None", self._receive())

    @property
    def alive(self) -> bool:
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def fork(self, request: dict[str, Any]) -> int:
        """Fork a group and return the process id of its leader.

        Raises:
            BenchboxError: the server was killed.
        """
        answer = self._request(action="fork", leader=None, **request)
        if answer is None:
            raise BenchboxError("the fork server was killed; the same command starts another and resumes")
        return int(answer["leader"])

    def poll(self, leader: int, timeout_s: float) -> int | None:
        """Return the exit code of a group, or None if it still runs after a time. A group ends together with its server."""
        answer = self._request(action="poll", leader=leader, timeout_s=timeout_s)
        return _SERVER_LOST if answer is None else answer["exit_code"]

    def release(self, leader: int) -> None:
        """Reap the leader of a group of which no process is left."""
        self._request(action="release", leader=leader)

    def close(self) -> None:
        with suppress(OSError):  # it has ended, and a request to it is still in the buffer
            self._channel.close()
        self._socket.close()

    def _request(self, **request: Any) -> dict[str, Any] | None:
        """Return the answer to a request, or None if the server has ended."""
        try:
            self._channel.write(json.dumps(request) + "\n")
            self._channel.flush()
        except OSError:
            return None
        return self._receive()

    def _receive(self) -> dict[str, Any] | None:
        try:
            line = self._channel.readline()
        except OSError:
            return None
        return json.loads(line) if line else None


class _ServerStartError(BenchboxError):
    """Importing failed, or did something that a forked child would not have, such as a thread."""


class _OwnServer(_Server):
    """A server that this process starts, and that ends with it."""

    def __init__(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the server runs)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchbox.worker.fork_server", str(theirs.fileno()), *preload],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches only benchbox, which then ends the group
            )
        super().__init__(ours)
        if self.greeting is None:
            code = self._process.wait()
            self._log.seek(0)
            output = self._log.read().decode(errors="replace").strip().splitlines()
            self.close()
            reason = output[-1] if output else f"exit code {code}"
            raise _ServerStartError(f"the fork server could not start: {reason.removeprefix('AssertionError: ')}")

    def close(self) -> None:
        super().close()
        self._process.wait()
        self._log.close()


class _ForkedGroup(RankGroup):
    def __init__(self, server: _Server, leader: int, job_id: str, exits: Path, grace_s: float) -> None:
        self._server = server
        self._leader = leader
        self._job_id = job_id
        self._exits = exits
        self._grace_s = grace_s

    def poll(self, timeout_s: float = 0.0) -> int | None:
        return self._server.poll(self._leader, timeout_s)

    def signal_ranks(self, pids: Sequence[int], number: int) -> None:
        signal_processes(self._job_id, pids, number, session=self._leader)

    def end(self) -> None:
        end_processes(self._job_id, session=self._leader, grace_s=self._grace_s)
        self._server.release(self._leader)

    def failures(self) -> Sequence[RankExit]:
        return read_rank_exits(self._exits)
