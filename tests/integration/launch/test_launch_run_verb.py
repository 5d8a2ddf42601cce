"""`benchbox run` before anything is launched: every user error is one line, and nothing is started."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchbox.spec.load import load_matrix
from tests.support.commands import run_in_process

MATRIX = """\
name: verb
policy: stand_in
size: tiny
backend: ddp
world_size: 2
batch: 2
data: synthetic
axes: {seed: [0, 1]}
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    (tmp_path / "verb.yaml").write_text(MATRIX)
    return tmp_path / "verb.yaml"


@pytest.fixture
def run(matrix: Path, policy_dir: Path) -> Run:
    def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
        return run_in_process("run", matrix, "--policy-dir", policy_dir, *options, cwd=matrix.parent)

    return run


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("error: ")
    assert all(word in line for word in words), line


def test_a_dry_run_prints_the_cells_and_makes_nothing(run: Run, matrix: Path) -> None:
    done = run("--dry-run", "--launches", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("in runs/verb: 0 launches are done, 6 would run\n")
    assert not (matrix.parent / "runs").exists()


def test_zero_launches_are_refused(run: Run) -> None:
    refused(run("--launches", "0"), "--launches 0: is no number of launches")


def test_a_matrix_without_a_cell_that_can_run_says_why(run: Run) -> None:
    refused(run("--set", "backend=hsdp"), "no cell can run", "hsdp needs at least 4 ranks")


def test_a_run_directory_that_is_a_file_is_refused(run: Run, matrix: Path) -> None:
    refused(run("--out", matrix), "verb.yaml", "--out")


@pytest.fixture
def damaged_record(matrix: Path, policy_dir: Path) -> Path:
    cell = next(load_matrix(matrix, policy_dirs=[policy_dir]).cells())
    record = matrix.parent / "runs" / "verb" / "cells" / cell.cell_id / "launch-1.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"schema_version": 1, ')
    return record


def test_a_damaged_record_is_named_and_not_overwritten(run: Run, matrix: Path, damaged_record: Path) -> None:
    refused(run(), str(damaged_record.relative_to(matrix.parent)), "not whole JSON")
    assert damaged_record.read_text() == '{"schema_version": 1, '


@pytest.mark.usefixtures("damaged_record")
def test_a_run_names_its_matrix_as_the_command_line_did(matrix: Path, policy_dir: Path) -> None:
    """A matrix that comes with benchbox would otherwise put the path of the installation into every published report."""
    (matrix.parent / "matrices").mkdir()
    matrix.rename(matrix.parent / "matrices" / "verb.yaml")
    refused(run_in_process("run", "verb", "--policy-dir", policy_dir, cwd=matrix.parent), "not whole JSON")
    assert json.loads((matrix.parent / "runs" / "verb" / "run.json").read_text())["matrix_file"] == "verb"
