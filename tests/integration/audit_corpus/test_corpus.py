"""Tests of the auditor on the part of the corpus that needs one process and no library beside torch.

The scripts run in forks of two interpreters without benchbox, one of them with the observer injected as `audit-precision` does.
`make audit-corpus` runs the whole corpus by its real commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchbox.audit.judge import judge
from benchbox.observer.facts import RankFacts
from tests.audit_corpus.execution import SCRIPTS
from tests.audit_corpus.forks import run_in_forks
from tests.audit_corpus.table import CASES
from tests.audit_corpus.verdicts import judge_findings

if TYPE_CHECKING:
    from tests.audit_corpus.cases import Case
    from tests.audit_corpus.forks import Runs

SELECTED = [case for case in CASES if case.ci]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_in_forks(tmp_path_factory.mktemp("corpus"), SCRIPTS, SELECTED)


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
