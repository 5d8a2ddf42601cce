"""Cells of modules of others, run by the command line, here or in an environment with another package."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.commands import run_in_process

if TYPE_CHECKING:
    from tests.support.environments import Environment

RANKS = {"single": 1, "ddp": 2, "fsdp1_full": 2, "fsdp1_grad_op": 2, "fsdp2": 2, "hsdp": 4, "zero1": 2, "zero2": 2, "zero3": 2}

_ROOT = Path(__file__).parents[2]
_SITE = _ROOT / "tests" / "integration" / "adapters" / "site"
_MATRIX = """\
name: trial
size: tiny
batch: 2
optim: {lr: 1.0e-3, schedule: constant, warmup_steps: 0}
measure: {warmup_steps: 1, steps: 2, launches: 1}
"""


def set_ups(backends: list[str], **fields: Any) -> list[dict[str, Any]]:
    """Return a point of a matrix for each backend, with its number of ranks."""
    return [{"backend": backend, "world_size": RANKS[backend], **fields} for backend in backends]


def run(
    folder: Path,
    points: list[dict[str, Any]],
    command: list[str] | None = None,
    environment: dict[str, str] | None = None,
    data: str = "synthetic",
) -> list[dict]:
    """Run the points as a matrix, and return the records of those that were not skipped.

    Args:
        command: how benchbox is started in another environment; the default is to run it in this process.
    """
    (folder / "matrix.yaml").write_text(f"{_MATRIX}data: {data}\ninclude: {json.dumps(points)}\n")
    arguments = ["run", "matrix.yaml", "--out", str(folder / "run")]
    if command is None:
        done = run_in_process(*arguments, cwd=folder)
    else:
        done = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)
    assert "report:" in done.stdout, done.stdout + done.stderr
    return [json.loads(path.read_text()) for path in sorted((folder / "run").rglob("launch-1.json"))]


def run_in(environment: Environment, folder: Path, points: list[dict[str, Any]], data: str = "synthetic") -> list[dict]:
    """Run the points in another environment, which gets benchbox by its path."""
    variables = environment.variables() | {"PYTHONPATH": f"{_SITE}{os.pathsep}{_ROOT}"}
    command = [str(environment.python), "-c", "from benchbox.cli.app import main; main()"]
    return run(folder, points, command, variables, data)


def failures(records: list[dict]) -> list[tuple[str, str, Any]]:
    """Return policy, backend and error of the records that did not end ok."""
    return [(r["cell"]["policy"], r["cell"]["backend"], r["error"]) for r in records if r["status"] != "ok"]


def alarms(records: list[dict]) -> list[tuple[str, str]]:
    """Return backend and code of the findings that would fail an audit."""
    return [
        (record["cell"]["backend"], finding["code"])
        for record in records
        for finding in record["precision"]["findings"]
        if finding["severity"] != "info"
    ]
