"""Ends of commands of the user."""

from __future__ import annotations

from benchbox.launch.process.command import CommandResult


def test_a_command_failed_by_its_exit_code_or_a_signal_unless_benchbox_ended_it() -> None:
    assert CommandResult(0, stopped=False).failure is None
    assert CommandResult(3, stopped=False).failure == "exit code 3"
    assert CommandResult(-9, stopped=False).failure == "ended by SIGKILL"
    assert CommandResult(-15, stopped=True).failure is None
