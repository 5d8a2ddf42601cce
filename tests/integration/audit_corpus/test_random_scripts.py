"""Scripts drawn at random: mistakes are found, the others leave the audit silent, and no bit of a training changes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from benchbox.audit.judge import judge
from benchbox.observer.facts import RankFacts
from tests.audit_corpus.execution import SCRIPTS
from tests.audit_corpus.forks import run_in_forks
from tests.audit_corpus.verdicts import judge_findings
from tests.support.random_scripts import random_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.exhaustive

SEEDS = (0,)
COUNT = 60  # from each of them on


@pytest.mark.parametrize("first", SEEDS)
def test_random_scripts_are_judged_by_what_is_in_them(tmp_path: Path, first: int) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(SCRIPTS / "checksums.py", scripts)
    cases = []
    for seed in range(first, first + COUNT):
        case, text = random_script(seed)
        (scripts / case.command[1]).write_text(text)
        cases.append(case)
    runs = run_in_forks(tmp_path, scripts, cases)
    assert runs.observed == runs.alone
    wrong = {}
    for case in cases:
        facts = RankFacts.from_dict(runs.facts[case.name])
        findings = [finding.to_dict() for finding in judge([facts]).findings]
        outcome = judge_findings(case, findings)
        if facts.problems or outcome not in ("found", "silent"):
            wrong[case.name] = (case.mistake, outcome, [finding["code"] for finding in findings], facts.problems)
    assert wrong == {}
