"""Signals that ask a process to stop."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from benchbox.errors import RecordError
from benchbox.launch.process.command import run_command
from benchbox.launch.process.signals import handle_stop_signals, stop_on_signals

if TYPE_CHECKING:
    from pathlib import Path

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_asks_to_stop_and_raises_nothing(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop()
        signal.raise_signal(number)
        signal.raise_signal(number)  # the impatient user
        assert stop()
    assert signal.getsignal(number) is before


def test_every_signal_is_passed_to_the_handler() -> None:
    received: list[int] = []
    with handle_stop_signals(received.append):
        for number in NUMBERS:
            signal.raise_signal(number)
    assert received == list(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_the_command_that_this_process_runs_and_not_this_process(number: signal.Signals) -> None:
    received_here: list[int] = []
    sent: list[int] = []

    def send_once() -> bool:
        if not sent:
            sent.append(number)
            signal.raise_signal(number)
        return bool(received_here)  # the command is ended, and not waited for, if it was not forwarded

    before = signal.signal(number, lambda number, _: received_here.append(number))
    try:
        result = run_command(["sleep", "600"], variables={}, quiet_stdout=False, should_stop=send_once)
    finally:
        signal.signal(number, before)
    assert (result.failure, received_here) == (f"ended by {number.name}", [])


def test_an_error_in_this_process_leaves_nothing_of_the_command_behind(tmp_path: Path) -> None:
    """Here the report that is polled for cannot be read, once the command has started another process."""
    pids = tmp_path / "pids"

    def read_report() -> bool:
        if not pids.exists() or len(pids.read_text().split()) < 2:
            return False
        raise RecordError("cannot be read")

    command = ["bash", "-c", f"sleep 600 & echo $$ $! > {pids}; wait"]
    with pytest.raises(RecordError, match="cannot be read"):
        run_command(command, variables={}, quiet_stdout=False, should_stop=read_report)
    alive = [pid for pid in map(int, pids.read_text().split()) if is_alive(pid)]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert alive == []


def is_alive(pid: int) -> bool:
    """Return whether a process runs: one that has ended stays a zombie where nobody reaps it."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nohup` starts a process with SIGHUP ignored, so that it survives the end of its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
