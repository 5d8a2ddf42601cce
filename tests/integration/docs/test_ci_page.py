"""The workflow of docs/ci.md, run step by step as it is written, in a repository of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from benchbox.report import write_reports
from benchbox.store.run import RunStore

pytestmark = pytest.mark.ranks

PAGE = Path(__file__).parents[3] / "docs" / "ci.md"
MATRIX = """\
name: policy
policy: pi05
size: tiny
backend: single
world_size: 1
data: synthetic
recipe: fp32
measure: {warmup_steps: 1, steps: 2, launches: 1}
axes: {batch: [1]}
thresholds: [{metric: status, expect: ok}]
"""


def steps():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return YAML(typ="safe").load(text)["jobs"]["gate"]["steps"]


def test_the_steps_of_the_workflow_run_and_judge(tmp_path):
    commands = {step["name"]: step["run"] for step in steps() if "run" in step}
    assert list(commands) == ["Measure", "Check thresholds and baseline", "Annotate what became worse", "Summarise"]
    (tmp_path / "matrices").mkdir()
    (tmp_path / "matrices/policy.yaml").write_text(MATRIX)
    summary = tmp_path / "summary.md"
    of_the_workflow = {"GITHUB_BASE_REF": "main", "GITHUB_STEP_SUMMARY": str(summary)}
    benchbox = f'benchbox() {{ "{Path(sys.executable).parent}/benchbox" "$@"; }}'  # not by PATH, which fork servers compare

    def shell(command, **variables):
        process = ["bash", "-e", "-c", f"{benchbox}\n{command}"]
        environment = {**os.environ, **variables}
        return subprocess.run(process, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300)

    measured = shell(commands["Measure"])
    assert measured.returncode == 0, measured.stdout + measured.stderr
    assert shell(commands["Check thresholds and baseline"]).returncode == 0
    publish_a_run_that_needed_half_the_memory(tmp_path)
    commit = "git init -q -b main && git add reports && git -c user.name=n -c user.email=e commit -q -m m"
    assert shell(f"{commit} && git update-ref refs/remotes/origin/main main").returncode == 0
    annotated = shell(commands["Annotate what became worse"], **of_the_workflow)
    assert annotated.returncode == 4, annotated.stderr
    assert annotated.stdout.startswith("::error file=matrices/policy.yaml,line=9,title=peak_allocated_bytes%3A regression::")
    assert shell(commands["Summarise"], **of_the_workflow).returncode == 4
    answer, _, differences = summary.read_text().partition("**runs/policy against origin/main:reports/policy: 1 of ")
    assert answer.startswith("# policy\n")
    assert "1 cell of matrices/policy.yaml" in answer
    assert differences


def publish_a_run_that_needed_half_the_memory(folder):
    """Write the run of the base branch: what was measured, at another time and with another peak."""
    measured, base = RunStore(folder / "runs/policy"), RunStore(folder / "base")
    base.write_run(measured.run())
    for record in measured.records():
        worst = record["memory"]["worst"]
        halved = record["memory"] | {"worst": worst | {"allocated_peak_bytes": worst["allocated_peak_bytes"] // 2}}
        base.write_record(record | {"started_at": "2026-01-01T00:00:00+00:00", "memory": halved})
    write_reports(folder / "base", folder / "reports/policy", pack=True)
