"""The page on the Python interface: its code on data frames runs on a published run."""

from __future__ import annotations

import re
from pathlib import Path

import benchbox

ROOT = Path(__file__).parents[3]


def test_the_table_of_the_page_has_every_set_up_of_the_run_that_it_loads():
    """The run has several batches of a set-up: a table of one value each would be refused."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "results.cells.query" in block)
    *statements, expression = block.splitlines()
    names = {"results": benchbox.load(ROOT / "reports" / "fsdp_vs_zero2")}
    exec("\n".join(statements), names)
    table = eval(expression, names)
    assert set(table.columns) == {"fsdp1_full", "zero2"}
    assert table.notna().all(axis=None)
