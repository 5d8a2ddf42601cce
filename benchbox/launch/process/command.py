"""A command of the user's, run as a shell would run it: with its terminal, its signals and its own exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.errors import ConfigurationError, Problem
from benchbox.launch.process.processes import JOB_VARIABLE, end_processes
from benchbox.launch.process.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended: `code` is negative when a signal ended it; `stopped` that it was we who did."""

    code: int
    stopped: bool

    @property
    def failure(self) -> str | None:
        """What went wrong, for people; None if nothing did."""
        if self.stopped or not self.code:
            return None
        return f"exit code {self.code}" if self.code > 0 else f"ended by {signal.Signals(-self.code).name}"


def run_command(
    command: Sequence[str], *, variables: Mapping[str, str], quiet_stdout: bool, enough: Callable[[], bool]
) -> CommandResult:
    """Run a command to its end. It has our stdin, stdout and stderr, and a process group of its own.

    Ctrl-C and a polite kill are for the command: they are passed on, and we return when it has ended.

    Args:
        variables: added to our environment.
        quiet_stdout: what the command prints goes to stderr: stdout is kept for something else.
        enough: asked several times a second; once true, every process that the command started is ended.

    Raises:
        BenchboxError: a process cannot be ended.
        ConfigurationError: there is no such command.
    """
    mark = uuid.uuid4().hex
    process = _start(command, {**os.environ, **variables, JOB_VARIABLE: mark}, quiet_stdout=quiet_stdout)
    with Terminal(process.pid) as terminal, _passing_on(process.pid):
        while process.poll() is None:
            if enough():
                end_processes(mark, grace_s=_GRACE_S)
                return CommandResult(process.wait(), stopped=True)
            terminal.follow()
            time.sleep(_POLL_S)
    return CommandResult(process.returncode, stopped=False)


def _start(command: Sequence[str], environment: Mapping[str, str], *, quiet_stdout: bool) -> subprocess.Popen[bytes]:
    sys.stdout.flush()
    try:
        return subprocess.Popen(command, env=environment, stdout=sys.stderr if quiet_stdout else None, process_group=0)
    except FileNotFoundError:
        hint = "is its environment active?" if os.sep not in command[0] else None
        raise ConfigurationError(Problem(f"-- {command[0]}", "no such command", hint)) from None
    except OSError as error:
        hint = f"give it to its interpreter: python {command[0]}" if command[0].endswith(".py") else None
        raise ConfigurationError(Problem(f"-- {command[0]}", f"cannot be run: {error.strerror}", hint)) from None


@contextmanager
def _passing_on(group: int) -> Iterator[None]:
    """Within, signals that would end us go to a process group. One that is ignored on entry (`nohup`) stays ignored."""

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)

    before = {number: signal.getsignal(number) for number in _FORWARDED}
    taken = [number for number in _FORWARDED if before[number] is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
