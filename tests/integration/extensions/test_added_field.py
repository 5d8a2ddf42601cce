"""A field of a cell is declared in one line: everything that reads or prints cells follows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.example_run import CELL

ROOT = Path(__file__).parents[3]
LAST_FIELD = "    seed: Seed = field("
ADDED = '    patience: Count = field(default=3, metadata=about("How long it waits.") | ADDED_LATER)\n'
MATRIX = """\
name: patient
policy: alpha
size: tiny
world_size: 2
batch: 1
backend: ddp
axes: {patience: [3, 4]}
thresholds: [{metric: status, expect: ok, where: {patience: 4}}]
"""
PROBE = """
import json, sys
from pathlib import Path

import benchbox
from benchbox.analysis.summary import label, varying_fields
from benchbox.plan import plan
from benchbox.spec import load_matrix
from benchbox.spec.cell import Cell
from benchbox.spec.schema import json_schema
from benchbox.store.table import launch_table
from tests.support.example_run import example_record

matrix = load_matrix("patient.yaml", None, [Path("policies")])
cells = plan(matrix).cells
dicts = [cell.to_dict() for cell in cells]
old = json.loads(sys.argv[1])
properties = json_schema()["properties"]
print(json.dumps({
    "package": str(Path(benchbox.__file__).parent),
    "values": [values["patience"] for values in dicts],
    "ids": [cell.cell_id for cell in cells],
    "read_back": [Cell.from_dict(values) == cell for values, cell in zip(dicts, cells)],
    "only": [cell.patience for cell in plan(matrix, "patience=4").cells],
    "schema": properties["patience"],
    "labels": [label(values, varying_fields(dicts)) for values in dicts],
    "table": launch_table([example_record(cell) for cell in cells])["patience"].tolist(),
    "old": [Cell.from_dict(old).patience, Cell.from_dict(old).cell_id],
}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of benchbox that has one more field in `Cell`, a matrix and its policy."""
    folder = tmp_path_factory.mktemp("field")
    for name in ("benchbox", "tests/support"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests" / "__init__.py").touch()
    declarations = folder / "benchbox" / "spec" / "cell.py"
    source = declarations.read_text()
    assert source.count(LAST_FIELD) == 1
    declarations.write_text(source.replace(LAST_FIELD, ADDED + LAST_FIELD))
    (folder / "policies" / "alpha").mkdir(parents=True)
    (folder / "policies" / "alpha" / "policy.py").touch()
    (folder / "policies" / "alpha" / "presets.yaml").write_text("tiny: {}\n")
    (folder / "patient.yaml").write_text(MATRIX)
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *command], cwd=folder, env=variables, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def probed(package: Path) -> dict[str, Any]:
    done = run(package, "-c", PROBE, json.dumps(CELL.to_dict()))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert Path(result["package"]) == package / "benchbox"
    return result


def test_a_field_declared_in_one_line_is_an_axis_of_a_matrix(probed: dict[str, Any]) -> None:
    """Cells are planned, selected by --only, written to records and read back."""
    assert probed["values"] == [3, 4]
    assert probed["read_back"] == [True, True]
    assert probed["only"] == [4]


def test_a_field_declared_in_one_line_is_shown(probed: dict[str, Any], package: Path) -> None:
    """In the schema that editors read, in labels, in tables and in the printed plan."""
    assert probed["schema"] == {"description": "How long it waits.", "maximum": 1_000_000, "minimum": 1, "type": "integer"}
    assert probed["labels"] == ["patience=3", "patience=4"]
    assert probed["table"] == [3, 4]
    printed = run(package, "-m", "benchbox.cli.app", "plan", "patient.yaml")
    assert printed.returncode == 0, printed.stderr
    assert [line.split() for line in printed.stdout.splitlines() if probed["ids"][1] in line] == [[probed["ids"][1], "4"]]


def test_a_field_declared_in_one_line_is_checked(package: Path) -> None:
    """Its type refuses a value at its line and column, and a misspelt name is answered with it."""
    for text, line in (
        (MATRIX.replace("[3, 4]", "[3, 0]"), "error: bad.yaml:7:22: axes.patience[1] must be at least 1, not 0"),
        (MATRIX + "patienc: 3\n", "error: bad.yaml:9:1: unknown key 'patienc'; did you mean 'patience'?"),
    ):
        (package / "bad.yaml").write_text(text)
        refused = run(package, "-m", "benchbox.cli.app", "plan", "bad.yaml")
        assert (refused.returncode, refused.stderr.splitlines()) == (2, [line])


def test_a_field_that_was_added_later_leaves_existing_ids_alone(probed: dict[str, Any]) -> None:
    """Older records load with its default and the id they have; another value makes another cell."""
    assert probed["old"] == [3, CELL.cell_id]
    assert len(set(probed["ids"])) == 2
