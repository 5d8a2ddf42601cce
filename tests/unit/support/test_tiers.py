"""Tests that are marked `exhaustive` run on request, and a run says how many it left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest
from tests.support.tiers import in_tiers

@pytest.mark.parametrize("pair", in_tiers([((1, 2),), ((3, 4),), ((5, 6),)], lambda case: case[0][0] == 1))
def test_pair(pair, exhaustive):
    assert sum(pair) in (3, 7, 11) and (exhaustive or pair == (1, 2))
"""


@pytest.mark.parametrize(
    ("options", "summary", "line"),
    [
        ([], "1 passed, 2 deselected", "exhaustive tests left out: 2; --exhaustive and make test-all run them"),
        (["-n", "2"], "1 passed", "exhaustive tests left out: 2;"),
        (["--exhaustive"], "3 passed in", ""),
        (["-k", "pair2"], "3 deselected", "exhaustive tests left out: 1;"),
    ],
    ids=["default", "workers", "exhaustive", "selected"],
)
def test_exhaustive_tests_are_left_out_and_counted(tmp_path: Path, options: list[str], summary: str, line: str) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nmarkers = exhaustive\n")
    (tmp_path / "test_pairs.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(tmp_path)]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False).stdout
    assert summary in printed
    assert line in printed
    assert bool(line) == ("left out" in printed)
