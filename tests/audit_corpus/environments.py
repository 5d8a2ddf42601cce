"""Environments without benchbox that the scripts run in, built once below `build/audit-corpus`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.environments import Environment

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "audit-corpus"
REQUIREMENTS = HERE / "requirements"


def environment_names() -> list[str]:
    """Return the names of all environments."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def corpus_environment(name: str) -> Environment:
    """Return the environment of `requirements/<name>.txt`.

    Its packages are installed also where benchbox's environment, whose packages it borrows, has the same version: a borrowed
    one has no command.
    """
    return Environment(requirements=REQUIREMENTS / f"{name}.txt", root=BUILD, pip_options=("--ignore-installed",))


def build_deepspeed_extension(name: str) -> None:
    """Compile DeepSpeed's extension before anything is timed, and so that a killed script cannot leave a stale lock behind."""
    build = "from benchbox.backends.extension import build_extension; build_extension()"
    (BUILD / "torch-extensions").mkdir(parents=True, exist_ok=True)
    variables = corpus_environment(name).variables()
    subprocess.run([sys.executable, "-c", build], env=variables, check=True, timeout=600, capture_output=True)
