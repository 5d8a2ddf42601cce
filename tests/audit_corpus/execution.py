"""Run the command of a case to its end, and measure its processor time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from tests.audit_corpus.environments import BUILD, HERE, corpus_environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.audit_corpus.cases import Case

SCRIPTS = HERE / "scripts"
_POLL_S = 0.02
_GRACE_S = 10.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True, slots=True)
class Execution:
    """Output, exit code and cost of one run."""

    exit_code: int | None  # None: it ran into its time limit
    cpu_s: float  # user and system time of all its processes that ended
    stdout: str
    stderr: str
    outputs: dict[str, str]  # file -> SHA-256

    @property
    def checksums(self) -> list[str]:
        """Losses, weights and random numbers: the lines that scripts print for this purpose, and the files they wrote."""
        printed = [line for text in (self.stdout, self.stderr) for line in text.splitlines() if line.startswith("result ")]
        return printed + [f"{name} {digest}" for name, digest in self.outputs.items()]


def execute(case: Case, command: Sequence[str]) -> Execution:
    """Run a command in a fresh copy of the scripts, always at the same path, so that nothing depends on the folder's name."""
    folder = BUILD / "runs" / case.name
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "scripts"
    shutil.copytree(SCRIPTS, work, ignore=shutil.ignore_patterns("__pycache__"))
    (BUILD / "home").mkdir(exist_ok=True)
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=corpus_environment(case.environment).variables() | case.variables,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        exit_code, cpu_s = _wait(process, time.monotonic() + case.timeout_s)
    return Execution(
        exit_code=exit_code,
        cpu_s=cpu_s,
        stdout=(folder / "stdout").read_text(errors="replace"),
        stderr=(folder / "stderr").read_text(errors="replace"),
        outputs=_hash_outputs(work, case.outputs),
    )


def _wait(process: subprocess.Popen[bytes], deadline: float) -> tuple[int | None, float]:
    """Return the exit code and processor time of a process and its descendants, which are ended at the deadline."""
    timed_out = False
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return None if timed_out else process.returncode, usage.ru_utime + usage.ru_stime
        if not timed_out and time.monotonic() > deadline:
            timed_out = True
            _end(psutil.Process(process.pid))
        time.sleep(_POLL_S)


def _end(process: psutil.Process) -> None:
    """End a process and its descendants, which may be in process groups of their own, and leave the first to be reaped."""
    descendants = process.children(recursive=True)
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.terminate()
    _, alive = psutil.wait_procs(descendants, timeout=_GRACE_S)
    for descendant in [*alive, process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()


def _hash_outputs(folder: Path, patterns: Sequence[str]) -> dict[str, str]:
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
