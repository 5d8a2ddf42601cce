"""What an interpreter does that the observer was put into: real interpreters, and a torch that is a few lines long."""

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


def test_an_import_of_torch_that_fails_fails_as_it_would_and_a_later_one_is_noticed(python):
    """The first attempt raises in the middle of torch, the second goes through."""
    done = python(
        """
try:
    import torch
except RuntimeError as error:
    print(error)
import builtins
builtins.ready = True
import torch
print(torch.whole)
""",
        torch="import builtins\nif not hasattr(builtins, 'ready'): raise RuntimeError('no driver')\nwhole = True\n",
    )
    assert (done.stdout, done.stderr, done.returncode) == ("no driver\nTrue\n", "", 0)
    assert (python.reports / "torch").exists()


def test_a_torch_that_the_observer_cannot_use_is_used_by_the_program_and_the_trouble_is_told(python):
    done = python("import torch; print(torch.answer)", torch="answer = 42\n")
    assert (done.stdout, done.stderr, done.returncode) == ("42\n", "", 0)
    assert explain_no_steps(python.reports).startswith(
        "the observer could not start: ModuleNotFoundError: No module named 'torch.optim'"
    )


def test_whoever_asks_for_torch_gets_the_answer_that_it_would_have_got(python):
    """Looking for it, importing it, importing it anew: all by its own loader, and nothing of ours stays in the way."""
    done = python(
        """
import importlib, importlib.util, sys
print(type(importlib.util.find_spec("torch").loader).__name__)
import torch
print(type(torch.__loader__).__name__, vars(torch.__spec__.loader).keys() - {"name", "path"})
print(importlib.reload(torch) is torch, torch.times)
print([each for each in sys.meta_path if "TorchFinder" in type(each).__name__])
""",
        torch="times = globals().get('times', 0) + 1\n",
    )
    assert done.stdout.splitlines() == ["SourceFileLoader", "SourceFileLoader set()", "True 2", "[]"], done.stderr


def test_a_process_without_torch_loads_nothing_more_than_the_waiting(python):
    done = python("import sys; print(sorted(name for name in sys.modules if name.startswith('benchbox')))")
    assert done.stdout == "['benchbox_observer', 'benchbox_observer.bootstrap']\n"
    assert explain_no_steps(python.reports) == "no Python that the command started imported torch"


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_an_interpreter_that_is_closed_to_us_runs_and_is_known_to_be_closed(python, option):
    done = python("print('runs')", option)
    assert done.stdout == "runs\n"
    assert explain_no_steps(python.reports).startswith("no Python of the command could be looked into")


def test_a_sitecustomize_that_fails_fails_as_it_would(python, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("raise ValueError('mine')\n")
    done = python("print('runs')", PYTHONPATH=str(tmp_path / "own"))
    assert done.stdout == "runs\n"
    assert "Error in sitecustomize" in done.stderr
    assert "ValueError: mine" in done.stderr


def test_a_child_that_was_given_our_path_and_nothing_else_is_left_alone(python, tmp_path):
    """Programs put environments together for what they start; there is nowhere to write to then."""
    before = {each.name for each in tmp_path.iterdir()} | {"libraries", "observer"}
    program = """
import os, subprocess, sys
own = {"PYTHONPATH": os.environ["PYTHONPATH"]}
subprocess.run([sys.executable, "-c", "import torch; print(torch.answer)"], env=own, check=True)
"""
    done = python(program, torch="answer = 42\n")
    assert (done.stdout, done.stderr) == ("42\n", "")
    assert {each.name for each in tmp_path.iterdir()} == before
    assert not (python.reports / "torch").exists()
