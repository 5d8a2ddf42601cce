"""Two hosts as network namespaces of this machine, joined by a cable (veth) that can be pulled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

INTERFACE = "link0"  # of either host to the other


@dataclass(frozen=True)
class Host:
    """One of the hosts: a network namespace with one interface, and a host name for the processes that it starts."""

    name: str
    address: str
    hosts_file: Path  # the addresses of both, as /etc/hosts of their processes

    def start(
        self, command: Sequence[str], *, log: Path, variables: Mapping[str, str], folder: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host, which reaches the other one through its interface only."""
        # Not by `ip netns exec`, which hides /sys/fs/cgroup.
        script = f'mount --bind {self.hosts_file} /etc/hosts && hostname {self.name} && exec "$@"'
        words = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "--mount", "sh", "-c", script, "sh", *command]
        environment = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": INTERFACE}
        with log.open("wb") as output:
            return subprocess.Popen(words, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)

    def power_off(self) -> None:
        """Pull the cable and kill every process, so that nothing tells the other host: no packet arrives any more."""
        _ip("-n", self.name, "link", "set", INTERFACE, "down")
        self.kill_all()

    def kill_all(self) -> None:
        """Kill every process of this host."""
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):  # the death of its parent has ended it meanwhile
                os.kill(int(pid), signal.SIGKILL)

    def plug_in(self) -> None:
        """Connect the cable again."""
        _ip("-n", self.name, "link", "set", INTERFACE, "up")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts; skip the test, with the reason, where the kernel or the user rights do not allow them."""
    if missing := [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(missing)} here: network namespaces need iproute2 and util-linux")
    tag = f"bb{os.getpid()}"
    descriptor, name = tempfile.mkstemp(prefix="benchbox-hosts-")
    os.close(descriptor)
    hosts_file = Path(name)
    hosts = tuple(Host(f"{tag}{side}", f"10.213.{os.getpid() % 250}.{side}", hosts_file) for side in (1, 2))
    hosts_file.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts))
    hosts_file.chmod(0o644)
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        _ip("link", "add", hosts[0].name, "type", "veth", "peer", "name", hosts[1].name)
        for host in hosts:
            _ip("link", "set", host.name, "netns", host.name)
            _ip("-n", host.name, "link", "set", host.name, "name", INTERFACE)
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", host.name, "link", "set", interface, "up")
        try:
            yield hosts[0], hosts[1]
        finally:
            for host in hosts:  # a test that failed leaves its nodes running
                host.kill_all()
    except NotPermittedError as error:
        pytest.skip(f"this machine allows no network namespaces: {error}")
    finally:
        hosts_file.unlink()
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)  # its interface goes too


class NotPermittedError(Exception):
    """`ip` was refused."""


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermittedError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
