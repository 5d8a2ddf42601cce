"""Fork server: a process that has imported everything a rank needs, and forks groups of ranks on request.

`python -m benchbox.worker.fork_server FD [MODULE ...]`, with FD one end of a socket pair, and the modules to import if not all.
The server builds nothing: a group starts from imported modules only, as a new interpreter would after its imports. It serves
one request after another (see `ForkRequest`) and ends when the other end of the socket closes.

FD may also be a listening socket. Then the server is shared: it forks a server of its own for each client that connects.

For each job it forks the leader of a group of ranks (`benchbox.worker.forked_group`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from benchbox.registry.policies import policy_entry
from benchbox.worker.forked_group import GroupRequest, lead_group, run_forked
from benchbox.worker.parent import signal_on_parent_death
from benchbox.worker.preloading import PRELOADED_MODULES, preload

if TYPE_CHECKING:
    from collections.abc import Mapping


class ServerGreeting(TypedDict):
    """First line of JSON that a server sends once it has imported."""

    prefix: str  # of the Python environment
    environment: dict[str, str]  # in which it imported


class ForkRequest(GroupRequest):
    """One line of JSON that a launcher sends, answered by one line. The keys of the group are those of `fork`."""

    action: str  # fork (answered by {"leader": pid}), poll ({"exit_code": int | null}), release ({})
    leader: int | None  # of `poll` and `release`
    timeout_s: float  # of `poll`: the longest time until the answer, if the group runs


def main() -> NoReturn:
    """Import, then serve the launcher until it closes its end, or all clients that connect."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal_on_parent_death(signal.SIGKILL)
    # A batch system may send them to every process of a job. Ranks that train end after a step, and this process after them.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    greeting: ServerGreeting = {"prefix": sys.prefix, "environment": dict(os.environ)}  # before imports that set variables
    preload(tuple(sys.argv[2:]) or PRELOADED_MODULES)
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        _serve_clients(connection, greeting)
    _serve(connection, greeting)


def _serve_clients(listener: socket.socket, greeting: ServerGreeting) -> NoReturn:
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal_on_parent_death(signal.SIGKILL)
            _serve(connection, greeting)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _serve(connection: socket.socket, greeting: ServerGreeting) -> NoReturn:
    with connection.makefile("rw") as channel:
        _send(channel, greeting)
        for line in channel:
            _send(channel, _answer(json.loads(line), connection))
    os._exit(0)  # finalizing an interpreter with torch takes seconds


def _send(channel: Any, answer: Mapping[str, object]) -> None:
    channel.write(json.dumps(answer) + "\n")
    channel.flush()


def _answer(request: ForkRequest, connection: socket.socket) -> dict[str, Any]:
    if request["action"] == "fork":
        return {"leader": _fork_leader(request, connection)}
    leader = request["leader"]
    assert leader is not None
    if request["action"] == "release":
        with contextlib.suppress(ChildProcessError):  # released before
            os.waitpid(leader, 0)
        return {}
    _wait_for_end(leader, request["timeout_s"])
    # Not reaped until the release: its id stays that of the session, by which processes of the group are found.
    ended = os.waitid(os.P_PID, leader, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return {"exit_code": None}
    return {"exit_code": ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status}


def _wait_for_end(pid: int, timeout_s: float) -> None:
    """Wait until a child has ended, at most for a time."""
    descriptor = os.pidfd_open(pid)
    try:
        select.select([descriptor], [], [], timeout_s)
    finally:
        os.close(descriptor)


def _fork_leader(request: ForkRequest, connection: socket.socket) -> int:
    _read_presets_ahead(request)
    sys.stdout.flush()
    sys.stderr.flush()
    leader = os.fork()
    if leader == 0:
        os.close(connection.detach())  # the launcher learns of the end of the server by the end of the connection
        run_forked(lambda: lead_group(request))
    return leader


def _read_presets_ahead(request: ForkRequest) -> None:
    """Parse the presets of the job's policy and search all distributions for extensions, so that no rank of a launch need to.

    Both are cached until a file changes.
    """
    with contextlib.suppress(Exception):  # the ranks raise it again, as typed results
        os.chdir(request["folder"])
        job = json.loads(Path(request["job_file"]).read_text())
        cell = job["train"]["cell"] if job["kind"] == "train" else job["cell"]
        policy_entry(cell["policy"], [Path(directory) for directory in job["policy_dirs"]])


if __name__ == "__main__":
    main()
