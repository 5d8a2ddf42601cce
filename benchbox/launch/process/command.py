"""A command of the user, run as a shell would run it: with the terminal, the signals and an exit code of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.errors import ConfigurationError, Problem
from benchbox.launch.process.processes import JOB_VARIABLE, end_processes
from benchbox.launch.process.signals import handle_stop_signals
from benchbox.launch.process.terminal import ForegroundTerminal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_POLL_S = 0.1
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit of a command. `exit_code` is the negative signal number when a signal ended it."""

    exit_code: int
    stopped: bool  # benchbox ended it

    @property
    def failure(self) -> str | None:
        """The reason why the command failed, for people; None if it succeeded or benchbox ended it."""
        if self.stopped or not self.exit_code:
            return None
        return f"exit code {self.exit_code}" if self.exit_code > 0 else f"ended by {signal.Signals(-self.exit_code).name}"


def run_command(
    command: Sequence[str], *, variables: Mapping[str, str], quiet_stdout: bool, should_stop: Callable[[], bool]
) -> CommandResult:
    """Run a command to its end, with the stdin, stdout and stderr of this process and in a process group of its own.

    SIGINT, SIGTERM and SIGHUP are forwarded to the command, and this function returns once it has ended. An exception, such as
    one of `should_stop`, ends every process that the command started.

    Args:
        variables: added to the environment of this process.
        quiet_stdout: send the command's stdout to stderr, to keep stdout for the report.
        should_stop: polled several times a second; once true, every process that the command started is ended.

    Raises:
        BenchboxError: a process cannot be ended.
        ConfigurationError: there is no such command.
    """
    job_id = uuid.uuid4().hex
    process = _start(command, {**os.environ, **variables, JOB_VARIABLE: job_id}, quiet_stdout=quiet_stdout)

    def forward(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    try:
        with ForegroundTerminal(process.pid) as terminal, handle_stop_signals(forward):
            while process.poll() is None:
                if should_stop():
                    end_processes(job_id, grace_s=_GRACE_S)
                    return CommandResult(process.wait(), stopped=True)
                terminal.follow_suspension()
                time.sleep(_POLL_S)
    except BaseException:
        end_processes(job_id, grace_s=_GRACE_S)
        process.wait()
        raise
    return CommandResult(process.returncode, stopped=False)


def _start(command: Sequence[str], environment: Mapping[str, str], *, quiet_stdout: bool) -> subprocess.Popen[bytes]:
    sys.stdout.flush()
    try:
        return subprocess.Popen(command, env=environment, stdout=sys.stderr if quiet_stdout else None, process_group=0)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        message = "no such command" if is_missing else f"cannot be run: {error.strerror}"
        hint = "is its environment active?" if is_missing and os.sep not in command[0] else None
        if command[0].endswith(".py") and Path(command[0]).is_file():
            hint = f"give it to its interpreter: python {command[0]}"
        raise ConfigurationError(Problem(f"-- {command[0]}", message, hint)) from None
