"""A launch beside two busy processes says so on the terminal, in its record and in the report."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.commands import run_in_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.ranks

MATRIX = """\
name: host
policy: pi05
size: tiny
backend: single
world_size: 1
batch: 2
data: synthetic
measure: {warmup_steps: 2, steps: 20, launches: 1}  # long enough for the ticks that the kernel counts
axes: {cams: [1]}
"""


# Busy from the first to the last step of the launch, not while ranks import and the report is written.
BUSY = """
import pathlib, sys, time
events = ""
while '"probe"' not in events:
    if '"warmup"' not in events:
        time.sleep(0.02)
    for path in pathlib.Path(sys.argv[1]).glob("cells/*/launch-1/events-rank0.jsonl"):
        events = path.read_text()
"""


@pytest.fixture
def busy_processes(tmp_path: Path) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY, tmp_path / "runs" / "host"]) for _ in range(2)]
    yield
    for process in processes:
        process.kill()
        process.wait()


def run(folder: Path) -> tuple[str, dict[str, Any]]:
    """Run the matrix and return the output and the only record."""
    (folder / "host.yaml").write_text(MATRIX)
    # Threads that wait for one another beside busy processes would take minutes.
    done = run_in_process("run", "host.yaml", cwd=folder, variables={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = (folder / "runs" / "host" / "cells").glob("*/launch-1.json")
    return done.stdout + done.stderr, json.loads(record.read_text())


@pytest.mark.usefixtures("busy_processes")
def test_a_launch_beside_two_busy_processes_says_so_on_the_terminal_in_the_record_and_in_the_report(tmp_path: Path) -> None:
    output, record = run(tmp_path)
    (host,) = record["host"]["hosts"]
    assert host["other_cpu_share"] >= 0.10
    assert host["launch_cpu_share"] > 0
    assert host["load_average"]["end"] > 0
    assert record["host"]["devices_reason"]
    assert "warning: busy host during this launch: other processes used " in output
    assert "ok (one launch, busy host)" in output
    report = (tmp_path / "runs" / "host" / "report.md").read_text()
    assert "| ok (one launch, busy host) |" in report
    assert "busy host: in a launch of the cell, during the measured steps, processes that are not of the launch used" in report


def test_the_ranks_themselves_are_not_called_other_processes(tmp_path: Path) -> None:
    """On a host that is quiet otherwise this launch is not marked; what other programs do there is not for a test to assume."""
    output, record = run(tmp_path)
    (host,) = record["host"]["hosts"]
    assert host["launch_cpu_share"] > host["other_cpu_share"] or "busy host" in output
    held_back = (host["quota_throttled_s"] or 0.0) >= 0.05 * host["launch_cpu_share"] * host["window_s"] * host["cores"]
    assert ("busy host" in output) == (host["other_cpu_share"] >= 0.10 or host["steal_share"] >= 0.05 or held_back)
