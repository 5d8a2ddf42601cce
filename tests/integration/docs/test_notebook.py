"""The example notebook: what is committed is what its cells give today, and it names nothing of the machine it was made on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "docs" / "python.ipynb"


def test_the_committed_notebook_is_what_its_cells_give_today(tmp_path):
    for library in ("nbclient", "ipykernel"):
        pytest.importorskip(library, reason=f"{library} executes the notebook: pip install -e '.[dev]'")
    written = tmp_path / "python.ipynb"
    command = [sys.executable, ROOT / "docs" / "generate" / "notebook.py", written]
    subprocess.run(command, check=True, capture_output=True, timeout=300, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == [written], "the sockets of the kernel are left where the command ran"
    assert json.loads(written.read_text()) == json.loads(NOTEBOOK.read_text()), "docs/python.ipynb is outdated: run `make docs`"


def test_it_is_small_and_has_no_paths_and_no_errors():
    text = NOTEBOOK.read_text()
    assert len(text) < 40_000
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", ())]
    assert {output["output_type"] for output in outputs} == {"execute_result", "stream"}
    assert any("<table>" in output.get("data", {}).get("text/html", "") for output in outputs), "results show their table"
