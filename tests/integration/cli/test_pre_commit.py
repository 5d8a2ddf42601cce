"""The hook of pre-commit: its entry on good and bad files, and pre-commit itself where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from benchbox.errors import EXIT_OK, EXIT_USAGE

ROOT = Path(__file__).parents[3]
(HOOK,) = YAML(typ="safe").load((ROOT / ".pre-commit-hooks.yaml").read_text())
SHIPPED = sorted((ROOT / "matrices").rglob("*.yaml"))


def test_the_entry_passes_every_matrix_and_training_file_that_is_shipped(benchbox):
    program, *arguments = HOOK["entry"].split()
    assert program == "benchbox"
    assert all(re.search(HOOK["files"], path.relative_to(ROOT).as_posix()) for path in SHIPPED)
    done = benchbox(*arguments, *SHIPPED, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_OK, "", "")


def test_the_entry_names_the_problems_of_all_files(benchbox, tmp_path):
    bad = []
    for name, line in (("one", "polcy: pi05"), ("two", "policy: pi05\nworld_size: none")):
        bad.append(tmp_path / f"{name}.yaml")
        bad[-1].write_text(f"name: {name}\n{line}\naxes: {{backend: [ddp]}}\n")
    done = benchbox(*HOOK["entry"].split()[1:], bad[0], SHIPPED[0], bad[1])
    assert done.returncode == EXIT_USAGE
    assert f"{bad[0]}:2:1: unknown key 'polcy'" in done.stderr
    assert f"{bad[1]}:3:" in done.stderr


def test_the_entry_names_what_contradicts_within_a_training_file(benchbox, tmp_path):
    path = tmp_path / "t.yaml"
    text = (ROOT / "matrices" / "train" / "pi05.yaml").read_text()
    path.write_text(re.sub(r"^validation:.*\n(?: .*\n)*", "", text, flags=re.MULTILINE) + "validation: {every: 7}\n")
    done = benchbox(*HOOK["entry"].split()[1:], path)
    assert done.returncode == EXIT_USAGE
    assert "the data have no validation episodes" in done.stderr


def test_the_entry_takes_axes_of_a_training_file_as_run_does(benchbox):
    file = ROOT / "matrices" / "train" / "pi05.yaml"
    done = benchbox(*HOOK["entry"].split()[1:], file, "--set", "axes.batch=[1,2]", "--set", "measure.steps=4")
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_OK, "", "")


def test_pre_commit_runs_the_hook_on_changed_matrices_only(tmp_path):
    if shutil.which("pre-commit", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("pre-commit is not installed: pip install pre-commit")
    hooks = tmp_path / "hooks"
    project = tmp_path / "project"
    (project / "matrices").mkdir(parents=True)
    hooks.mkdir()
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    variables = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(tmp_path / "cache"),
    }
    for name in ("AUTHOR", "COMMITTER"):
        variables |= {f"GIT_{name}_NAME": "a", f"GIT_{name}_EMAIL": "a@example.com"}

    def run(*command: str, cwd: Path = project) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)

    for folder in (hooks, project):
        run("git", "init", "-q", cwd=folder)
    run("git", "add", ".", cwd=hooks)
    run("git", "commit", "-qm", "hooks", cwd=hooks)
    revision = run("git", "rev-parse", "HEAD", cwd=hooks).stdout.strip()
    configuration = f"repos:\n- repo: {hooks}\n  rev: {revision}\n  hooks: [{{id: {HOOK['id']}}}]\n"
    (project / ".pre-commit-config.yaml").write_text(configuration)
    matrix = project / "matrices" / "mine.yaml"
    matrix.write_text("name: mine\npolicy: pi05\nsize: tiny\nworld_size: 2\naxes: {backend: [ddp], batch: [2]}\n")
    (project / "other.yaml").write_text("not: a matrix\n")
    run("git", "add", ".")
    passed = run("pre-commit", "run", "--all-files")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "Passed" in passed.stdout
    matrix.write_text(matrix.read_text().replace("[ddp]", "[dpd]"))
    run("git", "add", ".")
    failed = run("pre-commit", "run", "--all-files")
    assert failed.returncode == 1
    assert "matrices/mine.yaml:5:" in failed.stdout
