"""A job of Slurm: submitted once, followed to its end by any later command, cancelled by Ctrl-C."""

from __future__ import annotations

import contextlib
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.errors import EXIT_USAGE, BenchboxError, CellFailedError, ConfigurationError, RecordError
from benchbox.store.files import complete_lines, read_json, write_json, write_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_POLL_S = 1.0
# The controller answers all users of a cluster, so a job whose state does not change is asked for less and less often.
_ASK_AT_MOST_S = 10.0
_COMMAND_LIMIT_S = 60.0  # a command of Slurm that has not ended then waits for a controller that is down
_NO_ANSWER_LIMIT_S = 600.0  # a controller that is restarted, or replaced by its backup, answers again after some minutes
# A job that Slurm no longer knows of has ended: it forgets them after some minutes.
FORGOTTEN = "FORGOTTEN"
# All other states are of jobs that run, wait or will be queued again.
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED"}
_ENDED |= {"RECONFIG_FAIL", "PREEMPTED", "REVOKED", FORGOTTEN}
_CANCEL_LIMIT_S = 90.0  # Slurm gives a job KillWait (by default 30 s) between SIGTERM and SIGKILL


class SlurmError(BenchboxError):
    """A command of Slurm failed."""

    exit_code = EXIT_USAGE


class SlurmJobError(CellFailedError):
    """Slurm ended a job before it was done: cancelled, out of time, a node failed."""


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a job in Slurm's words, and the reason that Slurm gives."""

    state: str
    reason: str = ""

    @property
    def active(self) -> bool:
        return self.state not in _ENDED

    @property
    def ended_by_itself(self) -> bool:
        """True once the command of the job has ended, with any exit code, and was not ended by Slurm."""
        return self.state in ("COMPLETED", "FAILED")

    def __str__(self) -> str:
        return self.state if self.reason in ("", "None") else f"{self.state} ({self.reason})"


class SlurmJob:
    """The newest job of a run directory. Script, id and output are in its folder `slurm`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "slurm"
        self._passed_on = 0  # bytes of the output
        self.id: int | None = None
        with contextlib.suppress(RecordError):  # never submitted
            self.id = int(read_json(self._folder / "job.json")["id"])

    @property
    def log(self) -> Path:
        return self._folder / f"job-{self.id}.log"

    def submit(self, script: str) -> None:
        """Submit a script and remember its job.

        Raises:
            SlurmError: Slurm refused it, and why.
            ConfigurationError: this machine has no Slurm.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "job.sh"
        write_text(path, script)
        self.id = int(_slurm("sbatch", "--parsable", str(path)).partition(";")[0])
        write_json(self._folder / "job.json", {"id": self.id})

    def state(self) -> JobState:
        """Return the state of the job.

        Raises:
            SlurmError: Slurm does not answer.
        """
        try:
            output = _slurm("squeue", "--noheader", "--states=all", f"--jobs={self.id}", "--format=%T|%r")
        except SlurmError as error:
            if "Invalid job id" in str(error):
                return JobState(FORGOTTEN)
            raise
        state, _, reason = output.partition("|")
        return JobState(state, reason) if state else JobState(FORGOTTEN)

    def follow(self, stop: Callable[[], bool], on_line: Callable[[str], None]) -> JobState | None:
        """Wait for the end of the job and return its last state; None once `stop` returns true, which leaves the job as it is.

        Args:
            stop: polled once a second.
            on_line: called with every change of the state, and every line of the output.

        Raises:
            SlurmError: Slurm has not answered for minutes.
        """
        questions = _Questions(self, on_line)
        while True:
            state = questions.state()
            self._pass_on_output(on_line)
            if state is not None and not state.active:
                return state
            if stop():
                return None
            time.sleep(_POLL_S)

    def cancel(self, on_line: Callable[[str], None]) -> None:
        """Cancel the job, wait until its processes have ended, and pass on what they have written."""
        _slurm("scancel", str(self.id))
        deadline = time.monotonic() + _CANCEL_LIMIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(SlurmError):  # it cancels the job also where it does not answer for now
                if not self.state().active:
                    break
            time.sleep(_POLL_S)
        self._pass_on_output(on_line)

    def _pass_on_output(self, on_line: Callable[[str], None]) -> None:
        """Pass on the lines of the output that are complete since the last call."""
        for line in complete_lines(self.log, self._passed_on):
            self._passed_on += len(line)
            on_line(line.decode(errors="replace").rstrip("\r\n"))


class _Questions:
    """Questions for the state of one job: ever fewer while it does not change, and over a time without answers."""

    def __init__(self, job: SlurmJob, on_line: Callable[[str], None]) -> None:
        self._job = job
        self._on_line = on_line
        self._shown = ""
        self._changed_at = self._answered_at = self._next_at = time.monotonic()

    def state(self) -> JobState | None:
        """Return the state; None where Slurm was not asked, because it was a moment ago, or did not answer.

        Raises:
            SlurmError: Slurm has not answered for minutes.
        """
        now = time.monotonic()
        if now < self._next_at:
            return None
        state = None
        try:
            state = self._job.state()
        except SlurmError as error:
            if now - self._answered_at > _NO_ANSWER_LIMIT_S:
                raise SlurmError(f"{error}; Slurm job {self._job.id} may go on: the same command follows it again") from None
            text = f"Slurm does not answer, and is asked again ({error})"
        else:
            text, self._answered_at = str(state), now
        if text != self._shown:
            self._shown, self._changed_at = text, now
            self._on_line(f"Slurm job {self._job.id}: {text}")
        self._next_at = now + min(_ASK_AT_MOST_S, (now - self._changed_at) / 10)
        return state


def _slurm(*command: str) -> str:
    """Run a command of Slurm and return what it printed. Ctrl-C in a terminal does not reach it."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, start_new_session=True, timeout=_COMMAND_LIMIT_S
        )
    except FileNotFoundError:
        message = f"--launcher slurm: there is no command {command[0]} on this machine; use it where Slurm is installed"
        raise ConfigurationError(message) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} has not ended within {_COMMAND_LIMIT_S:g} s") from None
    if done.returncode:
        raise SlurmError(f"{command[0]}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout.strip()
