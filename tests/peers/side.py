"""One side of a comparison: a process that trains, and takes steps when it is told to."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import IO, Any, Self, cast

from tests.parity.lerobot import ENVIRONMENT, VERSION

HERE = Path(__file__).parent
FOREVER = float("inf")
OURS, KERNELS_ALONE = "benchbox", "kernels alone"  # names of sides


class Side:
    """A process that answers a line with a number of steps by a line of JSON: `step_s`, `losses` and the phases, by step.

    Its first line, with torch's version, hyperparameters and a loss, comes when it has taken a step.

    Args:
        log: file of its standard error, which is that of this process otherwise.
    """

    def __init__(
        self,
        name: str,
        variant: str,
        command: list[str],
        variables: dict[str, str],
        precision: str = "",
        log: Path | None = None,
    ) -> None:
        self.label = ", ".join(filter(None, [name, variant, precision]))
        self._description = {"name": name, "variant": variant} | ({"precision": precision} if precision else {})
        self._command, self._variables, self._log = command, variables, log
        self._turns: list[dict[str, Any]] = []
        self._ready: dict[str, Any] = {}

    @classmethod
    def ours(cls, peer: str, variant: str) -> Self:
        """Return a side that runs benchbox's session."""
        command = [sys.executable, "-m", "tests.peers.ours", peer, variant]
        return cls(OURS, variant, command, {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})

    @classmethod
    def kernels(cls, peer: str, variant: str) -> Self:
        """Return a side that repeats the kernels of a step of benchbox and takes no step."""
        side = cls.ours(peer, variant)
        return cls(KERNELS_ALONE, variant, [*side._command, "--kernels"], side._variables)

    @classmethod
    def theirs(cls, folder: Path, variant: str) -> Self:
        """Return a side that runs lerobot's policy in its own environment."""
        command = [str(ENVIRONMENT.python), "-W", "ignore", str(HERE / "theirs.py"), str(folder), variant]
        return cls(VERSION, variant, command, ENVIRONMENT.variables())

    def start(self) -> None:
        """Start the process, and wait until it has taken a step."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the process."""
        log = None if self._log is None else self._log.open("w")
        self._process = subprocess.Popen(
            self._command, env=self._variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        if log is not None:
            log.close()

    @property
    def is_launched(self) -> bool:
        return hasattr(self, "_process")

    def tell(self, line: str) -> None:
        """Write a line to the process."""
        stream = cast("IO[str]", self._process.stdin)
        stream.write(f"{line}\n")
        stream.flush()

    def wait_ready(self, deadline: float = FOREVER) -> None:
        """Wait until the process has taken a step."""
        self._ready = self._read(deadline)

    def take_turn(self, steps: int, deadline: float = FOREVER) -> None:
        """Let the process take some steps while no other does."""
        self.tell(str(steps))
        self._turns.append(self._read(deadline) | {"rss": self._peak_resident_bytes()})

    def last_step_ms(self) -> float:
        """Return the median time of the steps of the last turn."""
        return 1000 * median(self._turns[-1]["step_s"])

    def end(self) -> None:
        """End the process, if it runs."""
        if self.is_launched:
            self._process.kill()
            self._process.wait()

    def result(self) -> dict[str, Any]:
        """Return everything that the process wrote."""
        return {**self._description, **self._ready, "turns": self._turns}

    def _peak_resident_bytes(self) -> int:
        """Return the peak of the process's own memory. Its `ru_maxrss` would be at least that of the process that forked it."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    def _read(self, deadline: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            RuntimeError: the process has ended.
            TimeoutError: the deadline, by the clock of `time.monotonic`, has passed.
        """
        stream = cast("IO[str]", self._process.stdout)
        if deadline < FOREVER and not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"{self.label}: no answer within the time")
        line = stream.readline()
        if not line:
            raise RuntimeError(f"{self.label}: ended with exit code {self._process.wait()}{self._last_message()}")
        return cast("dict[str, Any]", json.loads(line))

    def _last_message(self) -> str:
        lines = [] if self._log is None else self._log.read_text(errors="replace").split("\n")
        messages = [line.strip() for line in lines if line and not line.startswith((" ", "["))]
        return f": {messages[-1][:400]}" if messages else ""
