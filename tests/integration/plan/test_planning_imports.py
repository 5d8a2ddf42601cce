"""Imports of planning, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_planning_recipes_of_other_libraries_imports_none_of_them():
    code = (
        "import sys; from tests.unit.plan.test_planning import axis, matrix, plan;"
        "assert len(plan(matrix(axis('recipe', 'bf16_stochastic', 'bf16_kahan'))).cells) == 2;"
        "assert not {'torch', 'torchao', 'optimi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True, timeout=60)
