"""The plugin of pytest, in a project of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks

TESTS = """\
from pathlib import Path

import pytest

CELL = {"policy": "pi05", "recipe": "bf16_pure", "batch": 1, "data": "synthetic"}


@pytest.mark.benchbox(**CELL, backend="single", measure={"warmup_steps": 1, "steps": 2})
def test_figures(benchbox):
    assert benchbox.samples_per_s == pytest.approx(1 / benchbox.step_time_s)
    assert benchbox.peak_allocated_bytes > 2**20
    assert benchbox.value("mfu") is None
    assert list(benchbox.results.cells["launches"]) == [1]
    assert benchbox.failing == []


@pytest.mark.benchbox(**CELL, measure={"warmup_steps": 3, "steps": 2, "memory_limit": "1 MiB"})
def test_memory(benchbox):
    pass


@pytest.mark.benchbox(policy="pi50", batch=1)
def test_policy(benchbox):
    pass


def test_marker(benchbox):
    pass


@pytest.mark.benchbox(**CELL, axes={"cams": [4]})
def test_axes(benchbox):
    pass


@pytest.mark.benchbox(policy=Path("pi50"), batch=1, measure=3)
def test_path(benchbox):
    pass
"""


def test_tests_of_a_project_assert_throughput_memory_and_precision(tmp_path):
    (tmp_path / "test_policy.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-rfE", "-p", "no:cacheprovider"]
    environment = {**os.environ, "COLUMNS": "400"}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300)
    summary = {line.split(" - ")[0]: line for line in process.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))}
    assert len(summary) == 6, process.stdout + process.stderr
    figures = summary["FAILED test_policy.py::test_figures"]
    assert "AssertionError: assert ['BXP" in figures, "all figures before are right, and the precision is wrong"
    assert "the launch ended as oom: OutOfMemoryError: " in summary["ERROR test_policy.py::test_memory"]
    assert "unknown policy 'pi50'" in summary["ERROR test_policy.py::test_policy"]
    assert "needs a marker with the fields of a cell" in summary["ERROR test_policy.py::test_marker"]
    assert "describes one cell, and axes is for several" in summary["ERROR test_policy.py::test_axes"]
    assert "unknown policy 'pi50'" in process.stdout.partition("ERROR at setup of test_path ")[2].partition("____ ")[0]
    assert "measure must be" in process.stdout
    assert "matrix.yaml" not in process.stdout, "the marker is wrong, and no file of the user's"
