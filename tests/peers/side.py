"""One side of a comparison: a process that trains, and takes steps when it is told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, Self, cast

from tests.parity.lerobot import ENVIRONMENT, VERSION

HERE = Path(__file__).parent


class Side:
    """A process that answers a line with a number of steps by a line of JSON: `step_s`, `losses` and the phases, by step.

    Its first line, `{"torch": version}`, comes when it has taken a step.
    """

    def __init__(self, name: str, variant: str, command: list[str], variables: dict[str, str]) -> None:
        self.label = f"{name}, {variant}"
        self._name, self._variant = name, variant
        self._command, self._variables = command, variables
        self._turns: list[dict[str, Any]] = []
        self._ready: dict[str, Any] = {}

    @classmethod
    def ours(cls, peer: str, variant: str) -> Self:
        """Return a side that runs benchbox's session."""
        command = [sys.executable, "-m", "tests.peers.ours", peer, variant]
        return cls("benchbox", variant, command, {**os.environ, "OMP_NUM_THREADS": "1"})

    @classmethod
    def theirs(cls, folder: Path, variant: str) -> Self:
        """Return a side that runs lerobot's policy in its own environment."""
        command = [str(ENVIRONMENT.python), "-W", "ignore", str(HERE / "theirs.py"), str(folder), variant]
        return cls(VERSION, variant, command, ENVIRONMENT.variables())

    def start(self) -> None:
        """Start the process, and wait until it has taken a step."""
        self._process = subprocess.Popen(
            self._command, env=self._variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ready = self._read()

    def take_turn(self, steps: int) -> None:
        """Let the process take some steps while no other does."""
        stream = cast("IO[str]", self._process.stdin)
        stream.write(f"{steps}\n")
        stream.flush()
        self._turns.append(self._read() | {"rss": self._peak_resident_bytes()})

    def end(self) -> None:
        """End the process, if it runs."""
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.wait()

    def result(self) -> dict[str, Any]:
        """Return everything that the process wrote."""
        return {"name": self._name, "variant": self._variant, **self._ready, "turns": self._turns}

    def _peak_resident_bytes(self) -> int:
        """Return the peak of the process's own memory. Its `ru_maxrss` would be at least that of the process that forked it."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    def _read(self) -> dict[str, Any]:
        line = cast("IO[str]", self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self.label}: ended with exit code {self._process.wait()}")
        return cast("dict[str, Any]", json.loads(line))
