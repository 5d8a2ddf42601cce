"""Tests on real mistakes, each as a script: the audit reports the mistake, and nothing once it is repaired."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchbox.audit.judge import Judgement, judge
from benchbox.audit.rules import rules
from benchbox.launch.process.environment import host_variables
from benchbox.observer.facts import RankFacts
from tests.support.ranks import run_ranks

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """Expectations that a script declares. `also` are rules that rightly fire beside those the case is about; `severities` are
    those that differ from the rule's severity.
    """

    name: str
    ranks: int
    rules: tuple[str, ...]
    also: tuple[str, ...] = ()
    severities: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def read(cls, path: Path) -> Case:
        """Read the declarations without importing the script: importing DeepSpeed takes seconds."""
        declared: dict[str, Any] = {}
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name = statement.targets[0].id.lower()
                if name in cls.__dataclass_fields__:
                    declared[name] = ast.literal_eval(statement.value)
        return cls(name=path.stem, **declared)


CASES = [Case.read(path) for path in sorted((HERE / "cases").glob("*.py"))]
over_cases = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])


@pytest.fixture(scope="session")
def facts_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run each variant of the selected cases, and return the folder with their facts.

    Cases with the same number of ranks share a process group, which takes longer to start than they take to run.
    """
    items = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = {params["case"].name: params["case"] for params in items if isinstance(params.get("case"), Case)}
    out = tmp_path_factory.mktemp("facts")
    for ranks in sorted({case.ranks for case in selected.values()}):
        run([name for name, case in selected.items() if case.ranks == ranks], ranks, out)
    return out


def run(names: list[str], ranks: int, out: Path) -> None:
    """Run cases on forked ranks, or in one process that has none of the variables of a rank."""
    script = HERE / "run_cases.py"
    if ranks > 1:
        run_ranks(ranks, script, str(out), *names)
        return
    environment = {**os.environ, **host_variables(os.environ), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), str(out), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    if done.returncode:
        pytest.fail(done.stderr[-8000:])


def judge_variant(out: Path, case: Case, variant: str) -> Judgement:
    """Return the judgement of one variant of a case, from the facts of all its ranks."""
    results = [json.loads((out / f"{case.name}-{variant}-{rank}.json").read_text()) for rank in range(case.ranks)]
    for result in results:
        if "failed" in result:
            pytest.fail(f"{case.name}, {variant}:\n{result['failed']}")
    facts = [RankFacts.from_dict(result) for result in results]
    assert [problem for rank_facts in facts for problem in rank_facts.problems] == [], "the observer failed"
    return judge(facts)


@pytest.mark.ranks
@over_cases
def test_the_mistake_is_found_and_nothing_else(case: Case, facts_folder: Path) -> None:
    findings = judge_variant(facts_folder, case, "buggy").findings
    assert {finding.code for finding in findings if finding.severity != "info"} | set(case.rules) == {*case.rules, *case.also}
    for code in case.rules:
        severities = {finding.severity for finding in findings if finding.code == code}
        assert case.severities.get(code, rules()[code].severity) in severities, f"{code} fired as {severities or None}"


@pytest.mark.ranks
@over_cases
def test_the_repaired_script_has_no_findings(case: Case, facts_folder: Path) -> None:
    judgement = judge_variant(facts_folder, case, "repaired")
    assert [finding for finding in judgement.findings if finding.severity != "info"] == []
    assert set(case.rules) <= set(judgement.clean), "a rule that the case is about was not judged"


def test_every_rule_has_a_case_that_fires_it_and_whose_repair_does_not() -> None:
    assert {code for case in CASES for code in case.rules} == set(rules())
