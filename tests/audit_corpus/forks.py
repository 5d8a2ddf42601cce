"""Runs of scripts in forks of two interpreters without benchbox, one of them with the observer of `audit-precision`."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.audit.subjects.command.inject import inject, reports_folder
from tests.audit_corpus.environments import HERE, corpus_environment

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.audit_corpus.cases import Case

STEPS = 20


@dataclass(frozen=True)
class Runs:
    """Output of each script, alone and observed, and the facts of the observed ones."""

    alone: dict[str, list[str]]
    observed: dict[str, list[str]]
    facts: dict[str, dict[str, Any]]


def run_in_forks(folder: Path, scripts: Path, cases: Iterable[Case]) -> Runs:
    """Run the cases, which start Python with one of the scripts, alone and under the observer."""
    corpus_environment("base").build()
    environment = corpus_environment("base").variables()
    commands = {case.name: case.command[1:] for case in cases}
    alone, _ = _run(folder / "alone", scripts, commands, environment)
    injected = environment | inject(folder / "injected", STEPS, environment)
    observed, pids = _run(folder / "observed", scripts, commands, injected)
    host = os.uname().nodename
    facts = {}
    for name, pid in pids.items():
        path = reports_folder(folder / "injected") / f"facts-{host}-{pid}.json"
        if path.exists():
            facts[name] = json.loads(path.read_text())["facts"]
    return Runs(alone, observed, facts)


def _run(
    out: Path, scripts: Path, commands: dict[str, tuple[str, ...]], environment: dict[str, str]
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the lines that each script printed, and its process id."""
    out.mkdir()
    command = [corpus_environment("base").python, HERE / "forked_scripts.py", scripts, out]
    done = subprocess.run(
        command, env=environment, input=json.dumps(commands), capture_output=True, text=True, timeout=300, cwd=out
    )
    assert done.returncode == 0, done.stderr
    children = json.loads(done.stdout)
    printed = {name: (out / name).read_text().splitlines() for name in children}
    failed = {name: printed[name][-3:] for name, (_, exit_code) in children.items() if exit_code}
    assert failed == {}
    return printed, {name: pid for name, (pid, _) in children.items()}
