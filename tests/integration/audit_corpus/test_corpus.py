"""Tests of the auditor on the part of the corpus that needs one process and no library beside torch.

The scripts run in forks of two interpreters without benchbox, one of them with the observer injected as `audit-precision` does.
`make audit-corpus` runs the whole corpus by its real commands.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.audit.judge import judge
from benchbox.audit.subjects.command.inject import inject, reports_folder
from benchbox.observer.facts import RankFacts
from tests.audit_corpus.environments import HERE, corpus_environment
from tests.audit_corpus.execution import SCRIPTS
from tests.audit_corpus.table import CASES
from tests.audit_corpus.verdicts import judge_findings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.audit_corpus.cases import Case

STEPS = 20
SELECTED = [case for case in CASES if case.ci]


@dataclass(frozen=True)
class Runs:
    """Output of each script, alone and observed, and the facts of the observed ones."""

    alone: dict[str, list[str]]
    observed: dict[str, list[str]]
    facts: dict[str, dict[str, Any]]


def run_scripts(out: Path, environment: dict[str, str]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the lines that each script printed, and its process id."""
    out.mkdir()
    command = [corpus_environment("base").python, HERE / "forked_scripts.py", SCRIPTS, out]
    cases = json.dumps({case.name: case.command[1:] for case in SELECTED})
    done = subprocess.run(command, env=environment, input=cases, capture_output=True, text=True, timeout=300, cwd=out)
    assert done.returncode == 0, done.stderr
    children = json.loads(done.stdout)
    printed = {name: (out / name).read_text().splitlines() for name in children}
    failed = {name: printed[name][-3:] for name, (_, exit_code) in children.items() if exit_code}
    assert failed == {}
    return printed, {name: pid for name, (pid, _) in children.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("corpus")
    corpus_environment("base").build()
    environment = corpus_environment("base").variables()
    alone, _ = run_scripts(folder / "alone", environment)
    injected = environment | inject(folder / "injected", STEPS, environment)
    observed, pids = run_scripts(folder / "observed", injected)
    host = os.uname().nodename
    facts = {}
    for name, pid in pids.items():
        path = reports_folder(folder / "injected") / f"facts-{host}-{pid}.json"
        if path.exists():
            facts[name] = json.loads(path.read_text())["facts"]
    return Runs(alone, observed, facts)


def over(*, mistaken: bool) -> pytest.MarkDecorator:
    """Parametrise over the selected cases with or without a mistake."""
    cases = [pytest.param(case, id=case.name) for case in SELECTED if bool(case.mistake) is mistaken]
    return pytest.mark.parametrize("case", cases)


def verdict(case: Case, runs: Runs) -> tuple[str, list[tuple[str, str]]]:
    """Return the verdict on a case, and the codes and severities behind it."""
    facts = RankFacts.from_dict(runs.facts[case.name])
    assert facts.problems == (), "the observer failed"
    findings = [finding.to_dict() for finding in judge([facts]).findings]
    return judge_findings(case, findings), [(finding["code"], finding["severity"]) for finding in findings]


@over(mistaken=False)
def test_a_clean_script_has_no_finding(case: Case, runs: Runs) -> None:
    outcome, findings = verdict(case, runs)
    assert outcome == "silent", findings


@over(mistaken=True)
def test_a_plausible_mistake_is_found_and_nothing_else(case: Case, runs: Runs) -> None:
    outcome, findings = verdict(case, runs)
    assert outcome == "found", findings


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in SELECTED])
def test_losses_weights_and_random_numbers_are_bit_for_bit_those_without_the_observer(case: Case, runs: Runs) -> None:
    assert runs.observed[case.name] == runs.alone[case.name]
    assert any(line.startswith("result weights ") for line in runs.alone[case.name])
