"""Tests of the start of real interpreters with an injected observer, and with a stand-in for torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchbox.audit.subjects.command.inject import inject, reports_folder
from benchbox.audit.subjects.command.process_reports import explain_no_steps


@pytest.fixture
def python(tmp_path):
    """Run a program in an interpreter with the observer in it; `torch` is the source of the torch it finds."""

    def run(program, *options, torch="", **variables):
        (tmp_path / "libraries").mkdir()
        (tmp_path / "libraries" / "torch.py").write_text(torch)
        user = {**os.environ, "PYTHONPATH": str(tmp_path / "libraries")} | variables
        injected = inject(tmp_path / "observer", 3, user)
        return subprocess.run(
            [sys.executable, *options, "-c", program],
            env=user | injected,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    run.reports = reports_folder(tmp_path / "observer")
    return run


def test_a_failing_import_of_torch_still_fails_and_a_later_one_is_noticed(python):
    """The first attempt raises in the middle of torch, the second succeeds."""
    done = python(
        """
try:
    import torch
except RuntimeError as error:
    print(error)
import builtins
builtins.ready = True
import torch
print(torch.complete)
""",
        torch="import builtins\nif not hasattr(builtins, 'ready'): raise RuntimeError('no driver')\ncomplete = True\n",
    )
    assert (done.stdout, done.stderr, done.returncode) == ("no driver\nTrue\n", "", 0)
    assert (python.reports / "torch").exists()


def test_a_torch_that_the_observer_cannot_use_still_works_for_the_program_and_the_reason_is_reported(python):
    done = python("import torch; print(torch.answer)", torch="answer = 42\n")
    assert (done.stdout, done.stderr, done.returncode) == ("42\n", "", 0)
    assert explain_no_steps(python.reports).startswith(
        "the observer could not start: ModuleNotFoundError: No module named 'torch."
    )


def test_importing_and_reloading_torch_works_as_without_the_observer(python):
    """Finding, importing and reloading it use its own loader, and our finder is removed."""
    done = python(
        """
import importlib, importlib.util, sys
print(type(importlib.util.find_spec("torch").loader).__name__)
import torch
print(type(torch.__loader__).__name__, vars(torch.__spec__.loader).keys() - {"name", "path"})
print(importlib.reload(torch) is torch, torch.times)
print([finder for finder in sys.meta_path if "TorchFinder" in type(finder).__name__])
""",
        torch="times = globals().get('times', 0) + 1\n",
    )
    assert done.stdout.splitlines() == ["SourceFileLoader", "SourceFileLoader set()", "True 2", "[]"], done.stderr


def test_a_process_without_torch_loads_only_the_bootstrap(python):
    done = python("import sys; print(sorted(name for name in sys.modules if name.startswith('benchbox')))")
    assert done.stdout == "['benchbox_observer', 'benchbox_observer.bootstrap']\n"
    assert explain_no_steps(python.reports) == "no Python that the command started imported torch"


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_an_interpreter_that_ignores_the_environment_runs_unobserved(python, option):
    done = python("print('runs')", option)
    assert done.stdout == "runs\n"
    assert explain_no_steps(python.reports).startswith("no Python of the command could be looked into")


def test_a_failing_sitecustomize_still_fails(python, tmp_path):
    (tmp_path / "existing").mkdir()
    (tmp_path / "existing" / "sitecustomize.py").write_text("raise ValueError('mine')\n")
    done = python("print('runs')", PYTHONPATH=str(tmp_path / "existing"))
    assert done.stdout == "runs\n"
    assert "Error in sitecustomize" in done.stderr
    assert "ValueError: mine" in done.stderr


def test_a_child_process_with_only_our_python_path_runs_unobserved(python, tmp_path):
    """Programs may build a new environment for their children; without our other variables there is no folder to write to."""
    before = {path.name for path in tmp_path.iterdir()} | {"libraries", "observer"}
    program = """
import os, subprocess, sys
environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
subprocess.run([sys.executable, "-c", "import torch; print(torch.answer)"], env=environment, check=True)
"""
    done = python(program, torch="answer = 42\n")
    assert (done.stdout, done.stderr) == ("42\n", "")
    assert {path.name for path in tmp_path.iterdir()} == before
    assert not (python.reports / "torch").exists()
