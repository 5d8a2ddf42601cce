"""The command line starts fast because it imports nothing heavy. The tests check imports, because durations vary by machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MATRICES = Path(__file__).parents[3] / "matrices"
HEAVY = {"torch", "accelerate", "deepspeed", "transformers", "pandas", "pyarrow", "matplotlib", "scipy", "numpy", "av"}
PROBE = """
import json, sys
import typer
from benchbox.cli.app import app
command = typer.main.get_command(app)
for arguments in json.loads(sys.argv[1]) or [[verb, "--help"] for verb in command.commands]:
    try:
        command(arguments)
    except SystemExit as end:
        assert not end.code, arguments
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def loaded(*commands: list[str]) -> set[str]:
    """Top-level modules in a fresh interpreter after these command lines; without any, after the help of every verb."""
    command = [sys.executable, "-c", PROBE, json.dumps(commands)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=MATRICES.parent)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_help_loads_nothing_heavy_and_not_even_the_matrix_schema():
    assert not loaded(["--help"]) & (HEAVY | {"pydantic", "ruamel", "jinja2"})


def test_help_of_every_verb_loads_nothing_heavy():
    assert not loaded() & HEAVY


def test_planning_and_listing_import_no_torch():
    lists = [["list", kind] for kind in ("policies", "backends", "recipes", "metrics", "rules")]
    lists.append(["explain", "BXP101"])
    assert not loaded(["plan", str(MATRICES / "fsdp_vs_zero2.yaml")], *lists) & HEAVY
