"""Output that cannot be written: one line, exit code 2, and no file cut off."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import EXIT_USAGE
from benchbox.store.table import LaunchTable
from tests.support.example_run import write_example

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = [sys.executable, "-m", "benchbox.cli.app"]


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as a disk would that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def in_mount_namespace(mount: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command that alone sees a mount, such as a file system of a few pages."""
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    try:
        subprocess.run([*unshare, mount], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    return subprocess.run([*unshare, f'{mount} && exec "$@"', "sh", *command], capture_output=True, text=True, check=False)


# A verb whose last line is still buffered when it returns.
BUFFERED = "from benchbox.cli import app; app.app = lambda **_: print('last line'); app.main()"


@pytest.mark.parametrize("command", [[*COMMAND, "--version"], [sys.executable, "-c", BUFFERED]], ids=["at once", "buffered"])
def test_a_full_standard_output_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        environment = os.environ | {"PYTHONUNBUFFERED": ""}
        result = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.stderr == "error: standard output: No space left on device; make room, or write elsewhere\n"
    assert result.returncode == EXIT_USAGE


def test_a_report_on_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    run, small = write_example(tmp_path / "run").path, tmp_path / "small"
    small.mkdir()
    result = in_mount_namespace(f"mount -t tmpfs -o size=16k none {small}", *COMMAND, "report", run, "--out", small)
    assert result.stderr == f"error: {small}/report.html: No space left on device; make room, or write elsewhere\n"
    assert result.returncode == EXIT_USAGE


@pytest.mark.parametrize("kilobytes", [60, 100])
def test_figures_on_a_full_disk_are_one_line_that_names_the_file_and_none_is_left_in_part(tmp_path: Path, kilobytes) -> None:
    run, small = write_example(tmp_path / "run").path, tmp_path / "small"
    small.mkdir()
    command = (*COMMAND, "report", run, "--figures", small)
    shown = ("sh", "-c", 'small=$1; shift; "$@"; code=$?; ls -A $small; exit $code', "sh", small, *command)
    result = in_mount_namespace(f"mount -t tmpfs -o size={kilobytes}k none {small}", *shown)
    named = re.fullmatch(rf"error: {small}/(.*): No space left on device; make room, or write elsewhere\n", result.stderr)
    assert named, result.stderr
    assert named[1] not in result.stdout.split()
    assert not [name for name in result.stdout.split() if name.endswith(".tmp")]
    assert result.returncode == EXIT_USAGE


def test_a_run_on_a_full_disk_is_one_line_that_names_the_directory(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    fill = f"mount -t tmpfs -o size=16k none {small} && (cat /dev/zero > {small}/fill; true) 2> /dev/null"
    result = in_mount_namespace(fill, *COMMAND, "run", "fsdp_vs_zero2", "--out", small)
    assert result.stderr.startswith(f"error: {small}: cannot be locked (No space left on device); name a directory ")
    assert result.returncode == EXIT_USAGE


def test_a_report_of_a_read_only_run_prints_its_table_and_one_line(tmp_path: Path) -> None:
    run = write_example(tmp_path / "run").path
    mount = f"mount --bind {run} {run} && mount -o remount,ro,bind {run}"
    result = in_mount_namespace(mount, *COMMAND, "report", run)
    assert "fsdp1_full" in result.stdout
    assert result.stderr == f"error: {run}/report.html: Read-only file system; write elsewhere\n"
    assert result.returncode == EXIT_USAGE


@pytest.mark.parametrize("name", ["table.csv", "table.parquet"])
def test_a_table_that_cannot_be_written_leaves_the_old_one_whole(name: str, tmp_path: Path) -> None:
    """The error has the name of the table, not of the temporary file in its place."""
    with LaunchTable() as table:
        for record in write_example(tmp_path / "run").records():
            table.add(record)
        table.write(tmp_path)
        assert (tmp_path / "table.csv").stat().st_size < (tmp_path / "table.parquet").stat().st_size
        before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        with file_size_limit(len(before[tmp_path / name]) - 1), pytest.raises(OSError, match="File too large") as raised:
            table.write(tmp_path)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(tmp_path / name))
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
