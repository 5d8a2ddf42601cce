"""A process that stops after its step when it is asked, and at once when it must."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from benchbox.store.events import read_events
from tests.support.processes import minimal_environment

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import sys, time
from pathlib import Path
from benchbox.store.events import EventWriter
from benchbox.worker.stop_signals import StopSignals

signals = StopSignals(EventWriter(Path(sys.argv[1]), 0), launcher=int(sys.argv[2]), handles_usr1=True)
if sys.argv[3] == "defer":
    signals.defer()
print("ready", flush=True)
while signals.requested is None:
    time.sleep(0.01)
print(signals.requested, flush=True)
time.sleep(600)
"""
# Sends a signal from another process than the parent of its receiver.
SENDER = "import os, sys; os.kill(int(sys.argv[1]), int(sys.argv[2]))"
PARENT = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"

needs_sender = pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="this system does not tell who sent a signal")


def start(folder: Path, *, launcher: int = 1, mode: str = "defer", parent: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*parent, sys.executable, "-c", SCRIPT, str(folder / "events"), str(launcher), mode]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=minimal_environment())
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    subprocess.run([sys.executable, "-c", SENDER, str(process.pid), str(int(number))], check=True)


def ended_by_sigterm(process: subprocess.Popen[str], folder: Path) -> bool:
    code = process.wait(60)
    return code == 128 + signal.SIGTERM and read_events(folder / "events")[0][-1]["event"] == "terminated"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_asks_and_a_sigterm_after_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path)
    send(process, number)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{number.name}\n"
    assert process.poll() is None
    send(process, signal.SIGTERM)
    assert ended_by_sigterm(process, tmp_path)


def test_sigterm_ends_a_process_that_does_not_train_yet(tmp_path: Path) -> None:
    process = start(tmp_path, mode="build")
    send(process, signal.SIGTERM)
    assert ended_by_sigterm(process, tmp_path)


def test_sigterm_ends_a_process_that_cannot_write_its_last_event(tmp_path: Path) -> None:
    (tmp_path / "events").symlink_to("/dev/full")
    process = start(tmp_path, mode="build")
    try:
        send(process, signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
    finally:
        process.kill()


@needs_sender
def test_sigterm_of_its_parent_ends_at_once(tmp_path: Path) -> None:
    """A parent sends it when another rank has failed."""
    process = start(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert ended_by_sigterm(process, tmp_path)


@needs_sender
def test_sigterm_of_the_launcher_ends_at_once(tmp_path: Path) -> None:
    """The launcher, here this process, sends it when the user does not want to wait."""
    process = start(tmp_path, launcher=os.getpid(), parent=(sys.executable, "-c", PARENT))
    (child,) = psutil.Process(process.pid).children()
    child.send_signal(signal.SIGTERM)
    assert ended_by_sigterm(process, tmp_path)


@needs_sender
def test_a_sigterm_that_follows_the_request_of_the_launcher_is_a_request_too(tmp_path: Path) -> None:
    """A batch system signals the launcher and this process, and the launcher's signal comes first."""
    process = start(tmp_path, launcher=os.getpid(), parent=(sys.executable, "-c", PARENT))
    (child,) = psutil.Process(process.pid).children()
    child.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == "SIGUSR1\n"
    number = int(signal.SIGTERM)
    subprocess.run([sys.executable, "-c", SENDER, str(child.pid), str(number)], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    subprocess.run([sys.executable, "-c", SENDER, str(child.pid), str(number)], check=True)
    assert ended_by_sigterm(process, tmp_path)
