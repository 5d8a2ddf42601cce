"""A private Slurm, with nodes of two cores: slurmctld, slurmd and munged with ports, keys and folders of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.support.namespaces import Host

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scancel", "scontrol", "srun")
_START_LIMIT_S = 60.0

_CONFIGURATION = """\
ClusterName=benchbox
SlurmctldHost={host}({address})
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=20
MpiDefault=none
PartitionName=cores Nodes=ALL Default=YES MaxTime=60 State=UP
"""


@contextmanager
def private_slurm(hosts: Sequence[Host] = ()) -> Iterator[dict[str, str]]:
    """Yield the variables by which commands reach it; skip the test, with the reason, where it cannot be started.

    Args:
        hosts: the nodes, the first of which has the controller; by default this machine.
    """
    missing = [name for name in _PROGRAMS if _program(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: Debian's packages slurm-wlm and munge have them")
    if os.geteuid():
        pytest.skip("a private Slurm is started as root only")
    folder = Path(tempfile.mkdtemp(prefix="benchbox-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    here = socket.gethostname().partition(".")[0]
    addresses = {host.name: host.address for host in hosts} or {here: "127.0.0.1"}
    daemons: list[subprocess.Popen[bytes]] = []

    def start(index: int, *command: str) -> subprocess.Popen[bytes]:
        log = folder / f"{Path(command[0]).name}.out"
        if hosts:
            return hosts[index].start(command, log=log, variables=variables, folder=folder)
        with log.open("wb") as output:
            return subprocess.Popen(command, env={**os.environ, **variables}, stdout=output, stderr=output)

    try:
        _write_configuration(folder, addresses)
        daemons.append(start(0, *_munged(folder)))  # its socket is a file, which all nodes share
        daemons.append(start(0, str(_program("slurmctld")), "-D"))
        daemons += [start(index, str(_program("slurmd")), "-D", "-N", name) for index, name in enumerate(addresses)]
        deadline = time.monotonic() + _START_LIMIT_S
        while (state := _states(start, folder)) != f"idle {len(addresses)}":
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-500:] for path in folder.glob("*.log"))
                pytest.skip(f"Slurm did not start: {state}\n{logs}")
            time.sleep(0.2)
        yield variables
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _write_configuration(folder: Path, addresses: Mapping[str, str]) -> None:
    (folder / "state").mkdir()
    for name in addresses:
        (folder / f"spool-{name}").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host, address = next(iter(addresses.items()))
    ports = {"controller_port": _free_port(), "node_port": _free_port()}
    nodes = "".join(f"NodeName={name} NodeAddr={addresses[name]} CPUs=2 State=UNKNOWN\n" for name in addresses)
    text = _CONFIGURATION.format(host=host, address=address, folder=folder, **ports)
    (folder / "slurm.conf").write_text(text.replace("PartitionName", nodes + "PartitionName"))


def _munged(folder: Path) -> list[str]:
    command = [str(_program("munged")), "--foreground", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
    command += ["--force", f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed"]
    return [*command, f"--log-file={folder}/munge.log"]


def _states(start: Callable[..., subprocess.Popen[bytes]], folder: Path) -> str:
    """Return the state and number of the nodes, such as `idle 2`."""
    start(0, "sinfo", "--noheader", "--format=%T %D").wait()
    return (folder / "sinfo.out").read_text().strip()


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
