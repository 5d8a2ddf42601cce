"""The instructions of docs/extending/policy.md, followed to the letter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.ranks


def test_the_documented_policy_runs_by_the_documented_command(tmp_path: Path) -> None:
    """The files and the command are those of the documentation; only the output folder and the selected cell differ."""
    page = (ROOT / "docs" / "extending" / "policy.md").read_text()
    section = re.search(r"## A policy written for benchbox\n(.*?)\n## ", page, re.DOTALL)
    assert section
    for block in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", section[1], re.DOTALL):
        file = tmp_path / block[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block[1])
    assert sorted(path.name for path in (tmp_path / "my_policies" / "terse").iterdir()) == ["policy.py", "presets.yaml"]
    printed = re.search(r"```\nbenchbox (run .*)\n```", section[1])
    assert printed
    arguments = printed[1].replace("matrices/", f"{ROOT}/matrices/").split()
    arguments += ["--set", "measure.steps=2,data=synthetic", "--only", "backend=fsdp2", "--out", str(tmp_path / "runs")]
    completed = subprocess.run(
        [str(Path(sys.executable).parent / "benchbox"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    records = [json.loads(path.read_text()) for path in (tmp_path / "runs").rglob("launch-1.json")]
    results = [(record["cell"]["policy"], record["cell"]["backend"], record["status"]) for record in records]
    assert results == [("terse", "fsdp2", "ok")]
    assert completed.stdout.startswith("text: random tokens\n")
