"""Imports of the formula, in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def test_the_formula_imports_no_torch():
    completed = subprocess.run(
        [sys.executable, "-c", "import sys, benchbox.theory.flops; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.strip() == "False"
