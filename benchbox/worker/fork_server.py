"""Fork server: a process that has imported everything a rank needs, and forks groups of ranks on request.

`python -m benchbox.worker.fork_server FD [MODULE ...]`, with FD one end of a socket pair, and the modules to import if not all.
The server builds nothing: a group starts from imported modules only, as a new interpreter would after its imports. It serves
one request after another (see `ForkRequest`) and ends when the other end of the socket closes.

FD may also be a listening socket. Then the server is shared: it forks a server of its own for each client that connects.

For each job it forks a group leader, which starts a session, forks the ranks and hosts their rendezvous store, as torchrun's
agent does. When a rank fails the leader ends the others and writes `exits.json`. Every process is tied to the life of its
parent: whoever is killed takes the processes below along.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from benchbox.registry.policies import policy_entry
from benchbox.worker.parent import signal_on_parent_death

if TYPE_CHECKING:
    from collections.abc import Mapping

# Libraries that start threads of their own when they are imported, and restart them in a forked child: OpenBLAS, jemalloc.
_THREADED_MODULES = ("numpy", "scipy.special", "pyarrow")

# What DeepSpeed's backends import until the end of a step.
DEEPSPEED_MODULES = (
    "torch.utils.cpp_extension",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    # Imported by every engine; it decorates functions with torch.compile, which imports all of torch._inductor.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "transformers.integrations.deepspeed",
    "distutils.ccompiler",
)

# What a rank imports until the end of its first steps, lazy imports of torch and accelerate included.
_PRELOADED_MODULES = (
    # Before torch: pydantic searches all modules that are imported for the sources of its models.
    "benchbox.spec",
    "torch",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.profiler._cupti_monitor",
    "torch.utils.data",
    "accelerate",
    "accelerate.utils",
    "pydantic.dataclasses",
    "pydantic.type_adapter",
    *DEEPSPEED_MODULES,
    "transformers",
    "av",
    "benchbox.backends.extension",
    "benchbox.backends.deepspeed",
    "benchbox.backends.fsdp1",
    "benchbox.backends.fsdp2",
    "benchbox.backends.replicated",
    "benchbox.worker.measuring",
    "benchbox.worker.rank",
    "benchbox.worker.training",
)

_POLL_S = 0.02
_GRACE_S = 30.0  # as torchrun's agent: from SIGTERM to SIGKILL


class ServerGreeting(TypedDict):
    """First line of JSON that a server sends: what it imported, and where."""

    prefix: str  # of the Python environment
    environment: dict[str, str]  # in which it imported
    missing: dict[str, str]  # see `preload`


class ForkRequest(TypedDict):
    """One line of JSON that a launcher sends, answered by one line."""

    action: str  # fork (answered by {"leader": pid}), poll ({"exit_code": int | null}), release ({})
    leader: int | None  # of `poll` and `release`
    timeout_s: float  # of `poll`: the longest time until the answer, if the group runs
    module: str  # of `fork`: run as `__main__` by every rank, with the job file as its argument
    job_file: str
    ranks: int
    environment: dict[str, str]  # complete
    folder: str  # working directory
    log: str  # output of the group until ranks open logs of their own
    exits: str


def main() -> NoReturn:
    """Import, then serve the launcher until it closes its end, or all clients that connect."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal_on_parent_death(signal.SIGKILL)
    greeting: ServerGreeting = {
        "prefix": sys.prefix,
        "environment": dict(os.environ),
        "missing": preload(tuple(sys.argv[2:]) or _PRELOADED_MODULES),
    }
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


def preload(modules: tuple[str, ...]) -> dict[str, str]:
    """Import modules that ranks need and return the errors of modules that cannot be imported, by module.

    Such a module fails again in the rank that needs it, as a typed result.

    Raises:
        AssertionError: importing initialised CUDA or started a thread, which a forked child would not have.
    """
    missing: dict[str, str] = {}
    gc.disable()  # what is imported stays: collections while importing take a sixth of the time, and free nothing
    _import_all(_THREADED_MODULES, missing)
    threads = _count_threads()
    _import_all(modules, missing)
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "CUDA was initialised before the fork"
    assert threading.active_count() == 1, f"threads were started before the fork: {threading.enumerate()}"
    assert _count_threads() == threads, "a library has started a thread before the fork"
    # A garbage collection would visit, and so copy, all that was imported, 0.2 s in every rank.
    gc.collect()
    gc.freeze()
    gc.enable()
    return missing


def _import_all(modules: tuple[str, ...], missing: dict[str, str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 (a library that is absent or broken may raise anything)
            missing[module] = f"{type(error).__name__}: {error}"


def _count_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


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
    if not hasattr(os, "pidfd_open"):  # not on Linux
        time.sleep(timeout_s)
        return
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
        run_forked(lambda: _lead(request))
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


def run_forked(function: Any) -> NoReturn:
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


def _lead(request: ForkRequest) -> int:
    """Start the ranks, wait for them, end them when one fails; return the exit code of the group."""
    os.setsid()
    signal_on_parent_death(signal.SIGKILL)
    _redirect_output(request["log"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    listener = socket.create_server(("127.0.0.1", 0))
    pids = {_fork_rank(request, rank, listener): rank for rank in range(request["ranks"])}

    store = _host_store(listener)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
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


def _fork_rank(request: ForkRequest, rank: int, listener: socket.socket) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        port = listener.getsockname()[1]
        listener.close()
        run_forked(lambda: _run_rank(request, rank, port))
    return pid


def _run_rank(request: ForkRequest, rank: int, port: int) -> int:
    signal_on_parent_death(signal.SIGKILL)
    os.environ.update(_rank_variables(rank, request["ranks"], port))
    if "numpy" in sys.modules:  # `random` seeds itself anew in a forked child, numpy's global generator does not
        sys.modules["numpy"].random.seed()
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


def _redirect_output(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    main()
