"""Group of forked ranks, and the process that leads it.

The leader starts a session, forks the ranks and hosts their rendezvous store, as torchrun's agent does. When a rank fails, it
ends the others and writes `exits.json`. Every process is tied to the life of its parent: whoever is killed takes the processes
below along.

The leader ignores SIGTERM, as the server that forks it does: who ends a group signals all its processes, and so may a batch
system, after which ranks that train take their step to its end.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from benchbox.worker.device_files import initialise_nvml
from benchbox.worker.output import redirect_output
from benchbox.worker.parent import signal_on_parent_death

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_S = 0.02
_GRACE_S = 30.0  # as torchrun's agent: from SIGTERM to SIGKILL


class GroupRequest(TypedDict):
    """A group of ranks that is asked for."""

    module: str  # run as `__main__` by every rank, with the job file as its argument
    job_file: str
    ranks: int
    environment: dict[str, str]  # complete
    folder: str  # working directory
    log: str  # output of the group until ranks open logs of their own
    exits: str


def run_forked(function: Callable[[], int | None]) -> NoReturn:
    """Run a function as the whole life of a forked process, whatever it raises."""
    code = 1
    try:
        code = int(function() or 0)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    except BaseException:  # noqa: BLE001 (it must never return into the server's loop)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def lead_group(request: GroupRequest) -> int:
    """Start the ranks, wait for them, end them when one fails; return the exit code of the group."""
    os.setsid()
    signal_on_parent_death(signal.SIGKILL)
    redirect_output(request["log"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    listener = socket.create_server(("127.0.0.1", 0))
    pids = {_fork_rank(request, rank, listener): rank for rank in range(request["ranks"])}

    store = _host_store(listener)
    try:
        return _wait_for(pids, Path(request["exits"]))
    finally:
        _end(pids)
        del store


def _host_store(listener: socket.socket) -> object:
    """Host the rendezvous store of the group; None if torch is not imported, so that no rank can have a process group.

    Called after the ranks were forked, because the threads of the store would not survive a fork. Ranks that connect earlier
    wait in the backlog of the socket.
    """
    if "torch" not in sys.modules:
        return None
    import torch.distributed as dist

    port = listener.getsockname()[1]
    store = dist.TCPStore  # type: ignore[attr-defined] # torch exports it without a stub
    return store("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _fork_rank(request: GroupRequest, rank: int, listener: socket.socket) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        port = listener.getsockname()[1]
        listener.close()
        run_forked(lambda: _run_rank(request, rank, port))
    return pid


def _run_rank(request: GroupRequest, rank: int, port: int) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server and the leader ignore it
    signal_on_parent_death(signal.SIGKILL)
    os.environ.update(_rank_variables(rank, request["ranks"], port))
    if "numpy" in sys.modules:  # `random` seeds itself anew in a forked child, numpy's global generator does not
        sys.modules["numpy"].random.seed()
    initialise_nvml()
    sys.argv = [request["module"], request["job_file"]]
    # As with `python -m`, modules of the working directory can be imported.
    sys.path[0] = request["folder"]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    return 0


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank on a single machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _wait_for(pids: dict[int, int], exits: Path) -> int:
    """Wait until all ranks have ended well (0), or write down those that failed first (1). Ended ranks leave `pids`."""
    failures: list[dict[str, Any]] = []
    options = 0
    while pids:
        ended, status = os.waitpid(-1, options)
        if not ended:
            break
        rank = pids.pop(ended)
        if code := os.waitstatus_to_exitcode(status):
            failures.append({"rank": rank, "code": code, "noticed_at": time.monotonic()})
            options = os.WNOHANG  # of the others, only those that have ended as well
    if failures:
        exits.write_text(json.dumps(failures))
    return 1 if failures else 0


def _end(pids: dict[int, int]) -> None:
    """End ranks that still run: SIGTERM, then SIGKILL."""
    deadline = time.monotonic() + _GRACE_S
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    while pids:
        for pid in list(pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del pids[pid]
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
