"""Input that no machine could run or read: one line and exit code 2, at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import EXIT_OK, EXIT_USAGE
from tests.support.commands import run_in_process

if TYPE_CHECKING:
    from pathlib import Path

MATRIX = "fsdp_vs_zero2"
TOO_MANY = "100000 ranks are more than"


@pytest.mark.timeout(60)
def test_a_matrix_that_is_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    pipe = tmp_path / "matrix.yaml"
    os.mkfifo(pipe)
    result = run_in_process("plan", pipe)
    assert result.stderr == f"error: {pipe}: is not a regular file; save it as one\n"
    assert result.returncode == EXIT_USAGE


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", MATRIX, "--set", "world_size=100000"),
        ("run", MATRIX, "--set", "world_size=100000", "--dry-run"),
        ("audit-precision", "--policy", "pi05", "--backend", "ddp", "--recipe", "fp32", "--world-size", "100000"),
        ("train", "pi05", "--set", "world_size=100000", "--set", "backend=ddp"),
        ("noise", MATRIX, "--set", "world_size=100000"),
        ("doctor", "--links", "--ranks", "100000"),
        ("doctor", "--peaks", "--ranks", "100000"),
    ],
    ids=["run", "dry run", "audit", "train", "noise", "links", "peaks"],
)
def test_a_hundred_thousand_ranks_are_refused_before_one_starts(arguments: tuple[str, ...], tmp_path: Path) -> None:
    out = () if arguments[0] in {"audit-precision", "doctor"} else ("--out", tmp_path / "run")
    result = run_in_process(*arguments, *out)
    assert TOO_MANY in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("take fewer\n")
    assert result.returncode == EXIT_USAGE


def test_a_plan_for_a_larger_machine_is_printed_with_a_note_that_this_one_cannot_run_it() -> None:
    result = run_in_process("plan", MATRIX, "--set", "world_size=100000")
    assert "8 walks to the largest batch that fits" in result.stdout
    assert f"this machine cannot run 8 of the cells: {TOO_MANY}" in " ".join(result.stdout.split())
    assert result.returncode == EXIT_OK
