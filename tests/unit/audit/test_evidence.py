"""Evidence of each rule: measured values of the worst tensor, with the place and the lowest rank that is affected."""

from __future__ import annotations

import pytest

from benchbox.audit.judge import judge
from benchbox.audit.record import summarize_numbers
from tests.support.evidence_cases import CASES, A, B
from tests.support.facts import ranks, tensor


@pytest.mark.parametrize("case", CASES)
def test_a_finding_has_its_place_the_lowest_rank_and_the_measured_values(case: str) -> None:
    facts, where, lowest_rank, evidence = CASES[case]
    (finding,) = [finding for finding in judge(facts).findings if finding.code == case[:6]]
    assert (finding.where, finding.rank) == (where, lowest_rank)
    assert finding.evidence == evidence


def test_every_rule_has_a_case() -> None:
    assert {case[:6] for case in CASES} == {*judge([]).not_judged}


def test_the_record_weights_shares_by_elements_and_updates() -> None:
    first = tensor(A, elements=1000, second_moment_stalled=0.25, updates=1000, updates_lost=100, update_dot=1e-3)
    second = tensor(B, elements=3000, second_moment_stalled=0.75, updates=4000, updates_lost=900, update_dot=2e-3)
    assert summarize_numbers(ranks(stepped=(first, second))) == {
        "edq": pytest.approx(0.5),
        "updates_lost": 0.2,
        "second_moment_stalled": 0.625,
    }


def test_the_record_has_no_numbers_of_what_was_not_measured() -> None:
    assert set(summarize_numbers(ranks(stepped=())).values()) == {None}
