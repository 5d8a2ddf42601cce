"""Shell completion: the command line completes itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def answer(**request: str) -> str:
    """Return what the command answers to the completion script of a shell."""
    command = [sys.executable, "-m", "benchbox.cli.app"]
    return subprocess.run(
        command, env={**os.environ, **request}, capture_output=True, text=True, timeout=60, check=False
    ).stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("benchbox", "ver"), ["verify"]),
        (("benchbox", "list", "re"), ["recipes"]),
        (("benchbox", "run", "--la"), ["--launches", "--launcher"]),
        (("benchbox", "check", "--format", "j"), ["json", "junit"]),
    ],
)
def test_verbs_options_and_their_values_are_completed(words: tuple[str, ...], offered: list[str]) -> None:
    request = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    assert sorted(answer(_BENCHBOX_COMPLETE="complete_bash", **request).split()) == sorted(offered)


def test_bash_gets_a_script_that_completes_benchbox() -> None:
    assert "complete -o default -F _benchbox_completion benchbox" in answer(_BENCHBOX_COMPLETE="source_bash")
