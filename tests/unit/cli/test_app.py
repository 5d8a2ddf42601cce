"""Errors on the command line: lines on stderr and an exit code."""

from __future__ import annotations

import errno
import os

import pytest

from benchbox import __version__
from benchbox.errors import EXIT_CELL_FAILED, EXIT_USAGE, CellFailedError
from tests.support.commands import run_in_process


def run_raising(error, monkeypatch):
    """Run the command with an application that ends with this error."""

    def fail(**_):
        print("printed before")
        raise error

    monkeypatch.setattr("benchbox.cli.app.app", fail)
    return run_in_process()


def test_the_version_is_printed():
    done = run_in_process("--version")
    assert (done.returncode, done.stdout) == (0, f"benchbox {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("noise",), "Missing argument 'MATRIX'."),
        (("run", "a.yaml", "--bogus"), "No such option"),
        (("bogus",), "No such command"),
    ],
)
def test_a_mistake_of_usage_is_named_below_the_usage(arguments, error):
    done = run_in_process(*arguments)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    usage, error_line = done.stderr.splitlines()[0], done.stderr.splitlines()[-1]
    assert usage.startswith("Usage: benchbox")
    assert error_line.startswith("Error: ")
    assert error in error_line


@pytest.mark.parametrize("command", [(), ("run",), ("plan",)])
def test_help_is_printed(command):
    done = run_in_process(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: benchbox")


def test_every_line_of_an_error_is_one_of_stderr_and_one_without_text_has_its_name(monkeypatch):
    done = run_raising(CellFailedError("one\ntwo"), monkeypatch)
    assert (done.returncode, done.stdout) == (EXIT_CELL_FAILED, "printed before\n")
    assert done.stderr == "error: one\nerror: two\n"
    assert run_raising(CellFailedError(""), monkeypatch).stderr == "error: CellFailedError\n"


def test_what_would_control_the_terminal_is_escaped_in_an_error(monkeypatch):
    done = run_raising(CellFailedError("größe \x1b[31mred\n\x9b2J"), monkeypatch)
    assert done.stderr == "error: größe \\x1b[31mred\nerror: \\x9b2J\n"


def test_an_interrupt_ends_with_the_exit_code_of_its_signal(monkeypatch):
    done = run_raising(KeyboardInterrupt(), monkeypatch)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "; make room, or write elsewhere"),
        (errno.EROFS, "; write elsewhere"),
        (errno.EISDIR, "; name a file"),
        (errno.ENAMETOOLONG, "; name a shorter one"),
        (errno.EACCES, ""),
    ],
)
def test_a_file_that_cannot_be_written_is_named_with_what_to_do(code, remedy, monkeypatch):
    done = run_raising(OSError(code, os.strerror(code), "out.json"), monkeypatch)
    assert (done.returncode, done.stderr) == (EXIT_USAGE, f"error: out.json: {os.strerror(code)}{remedy}\n")
    unnamed = run_raising(OSError(code, os.strerror(code)), monkeypatch)
    assert unnamed.stderr.startswith("error: standard output: ")


def test_any_other_error_is_a_bug_and_keeps_its_traceback(monkeypatch):
    for error in (ValueError("wrong"), FileNotFoundError(errno.ENOENT, "no such file")):
        with pytest.raises(type(error)):
            run_raising(error, monkeypatch)
