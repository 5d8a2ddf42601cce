"""Tests of every rule, on facts that it must fire on and on the most similar ones that it must not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchbox.audit.judge import judge
from benchbox.audit.rules import rules
from benchbox.observer.facts import SECTIONS, OpaqueOptimizer, RankFacts
from tests.support.facts import (
    HALF_MOMENTS,
    NORM,
    WEIGHT,
    edq,
    half,
    live,
    one_step_facts,
    rank,
    ranks,
    ranks_stepping,
    reduction,
    replicas,
    step_facts,
    tensor,
    unlinked,
    update_statistics,
)
from tests.support.near_misses import CLEAN
from tests.support.rule_cases import FIRES, Facts


def rule_parameters(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(code, *case[1:], id=f"{code}: {case[0]}")
        for code, cases_of_rule in table.items()
        for case in cases_of_rule
    ]


def severities(code: str, facts: Facts) -> list[str]:
    return [finding.severity for finding in judge(facts).findings if finding.code == code]


@pytest.mark.parametrize(("code", "severity", "facts"), rule_parameters(FIRES))
def test_it_fires_once_with_the_severity_of_the_catalogue(code: str, severity: str, facts: Facts) -> None:
    assert severities(code, facts) == [severity]


@pytest.mark.parametrize(("code", "facts"), rule_parameters(CLEAN))
def test_it_is_clean_on_near_misses(code: str, facts: Facts) -> None:
    judgement = judge(facts)
    assert severities(code, facts) == []
    assert code in {*judgement.clean, *(("BXP305",) if "scaler" in facts[0].missing else ())}, judgement.not_judged.get(code)


def test_the_table_covers_every_rule_of_the_catalogue() -> None:
    assert FIRES.keys() == CLEAN.keys() == rules().keys()
    assert len(rules()) == 32


def test_a_healthy_training_is_clean_of_every_rule() -> None:
    judgement = judge(ranks())
    assert (judgement.findings, dict(judgement.not_judged)) == ((), {})
    assert judgement.clean == tuple(rules())


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_that_one_rank_did_not_observe_neither_fires_nor_passes(section: str) -> None:
    """A rule that reads this section gives the reason; the others are still judged."""
    facts = [rank(0), rank(1, missing={section: "the film ran out"})]
    judgement = judge(facts)
    readers = {code for code, rule in rules().items() if section in rule.sections}
    assert judgement.findings == ()
    assert judgement.not_judged == dict.fromkeys(sorted(readers), "the film ran out")
    assert {*judgement.clean} == rules().keys() - readers


def test_every_section_has_a_rule_that_reads_it() -> None:
    assert {section for rule in rules().values() for section in rule.sections} == SECTIONS.keys()


def test_an_error_on_one_rank_is_found_although_another_observed_nothing() -> None:
    facts = [rank(0, missing=dict.fromkeys(SECTIONS, "it was late")), rank(1, stepped=(half(),))]
    assert severities("BXP101", facts) == ["error"]


def test_without_facts_nothing_is_judged() -> None:
    judgement = judge([])
    assert (judgement.findings, judgement.clean) == ((), ())
    assert judgement.not_judged.keys() == rules().keys()


@pytest.mark.parametrize(
    ("code", "facts", "reason"),
    [
        ("BXP102", ranks_stepping(half(updates=0, update_squared=0.0, update_dot=0.0)), "AdamW: no update was computed"),
        (
            "BXP102",
            ranks_stepping(
                half(updates=0, update_squared=0.0, update_dot=0.0),
                steps=step_facts(changed_gradients=lambda step: "AdamW calls its closure twice" if step > 1 else None),
            ),
            "AdamW calls its closure twice",
        ),
        ("BXP103", ranks(steps=step_facts(2)), "fewer than 3 steps"),
        ("BXP103", ranks_stepping(tensor(), tensor(NORM, optimizer="Muon", updates=0)), "Muon: no update was computed"),
        ("BXP104", ranks_stepping(tensor(live_differs=None)), "no master could be compared"),
        ("BXP105", ranks_stepping(tensor(live_device=None)), "the device of the live parameters was not observed"),
        ("BXP303", ranks(collectives=()), "no reduction of gradients was seen"),
        ("BXP401", ranks(steps=step_facts(schedule_rates={})), "the rates of no schedule were observed"),
        ("BXP403", ranks(steps=step_facts(schedule_steps={}, micro_batches=None)), "neither forward passes nor"),
        (
            "BXP404",
            ranks_stepping(unlinked(), parameters=(live(linked=None), live(NORM, linked=False))),
            "which of the stepped tensors",
        ),
        (
            "BXP404",
            [rank(0), rank(1, contract=None, stepped=(unlinked(),), parameters=(live(linked=None), live(NORM, linked=False)))],
            "which of the stepped tensors",
        ),
        ("BXP404", ranks(stepped=(), missing={"stepped": "it was late"}, parameters=(live(linked=False),)), "it was late"),
        ("BXP406", ranks_stepping(tensor(live_ndim=None, weight_decay=0.0)), "unsharded shapes"),
        (
            "BXP407",
            replicas(
                (tensor(),),
                (tensor(digest_after="beef"),),
                collectives=(reduction("float32", operation="recv"), reduction("float32", operation="send")),
            ),
            "ranks may hold different parts of a model: recv, send was seen",
        ),
        ("BXP501", ranks_stepping(tensor(steps_before=0)), "nothing was resumed"),
        ("BXP502", ranks_stepping(tensor(steps_before=0, steps_before_later=None)), "nothing was resumed"),
        ("BXP502", ranks_stepping(tensor(steps_before=0, steps_before_later=None)), "nor were moments compared after 3 steps"),
        ("BXP503", ranks(loads=()), "no optimizer state was loaded"),
        ("BXP504", ranks_stepping(tensor(live_differs_first=None)), "no master could be compared"),
        ("BXP601", ranks(products={}), "no matrix product was seen"),
    ],
)
def test_a_rule_without_its_evidence_is_not_judged(code: str, facts: Facts, reason: str) -> None:
    assert reason in judge(facts).not_judged[code]


def test_evidence_holds_numbers_names_and_ranks() -> None:
    (finding,) = [finding for finding in judge(edq(0.1)).findings if finding.code == "BXP102"]
    assert finding.evidence["edq"] == pytest.approx(0.1)
    assert finding.evidence["share of updates lost"] == pytest.approx(0.9)
    assert finding.evidence["ranks"] == [0, 1]
    assert (finding.evidence["names"], finding.evidence["edq of these"]) == ([WEIGHT], [pytest.approx(0.1)])
    assert "AReaL#1634" in finding.repair, "a repaired precision changes the effective learning rate"


def test_ten_tensors_are_named_and_the_others_counted() -> None:
    (finding,) = [
        finding
        for finding in judge(ranks_stepping(*(half(f"layer{i}") for i in range(13)))).findings
        if finding.code == "BXP101"
    ]
    assert finding.evidence["names"] == [f"layer{i}" for i in range(10)]
    assert (finding.evidence["more"], finding.evidence["tensors"]) == (3, 13)


def test_an_optimizer_that_cannot_be_read_is_reported_once_for_all_ranks() -> None:
    (finding,) = judge(ranks(opaque=(OpaqueOptimizer(optimizer="Mystery", reason="unknown"),))).findings
    assert (finding.code, finding.where, finding.rank, finding.evidence["ranks"]) == ("BXP604", "Mystery", 0, [0, 1])


def test_what_follows_from_a_finding_at_the_same_place_names_it_as_its_cause() -> None:
    lossy = half(state=HALF_MOMENTS, optimizer="AdamW", update_dot=0.0, updates_lost=3000)
    other_place = tensor(NORM, state=HALF_MOMENTS, optimizer="SGD")
    causes = {(finding.code, finding.where): finding.cause for finding in judge(ranks_stepping(lossy, other_place)).findings}
    assert causes["BXP101", "AdamW"] is None
    assert (causes["BXP102", "AdamW"], causes["BXP201", "AdamW"], causes["BXP201", "SGD"]) == ("BXP101", "BXP101", None)
    adapter = judge(ranks_stepping(half("layer.lora_A.weight", update_dot=1e-3))).findings
    severity_and_cause = {finding.code: (finding.severity, finding.cause) for finding in adapter}
    assert severity_and_cause["BXP101"] == ("warning", None)
    assert severity_and_cause["BXP102"] == ("error", None), "what fails the audit has no cause that does not"


def test_after_a_failure_of_the_observer_nothing_is_clean() -> None:
    judgement = judge(ranks(problems=("end: KeyError",)))
    assert judgement.clean == ()
    assert judgement.not_judged["BXP604"] == "the observer failed on rank 0: end: KeyError"


@pytest.mark.parametrize("code", FIRES)
def test_a_rule_whose_findings_differ_in_severity_says_when(code: str) -> None:
    seen = {severity for _, severity, _ in FIRES[code]}
    if seen != {rules()[code].severity}:
        assert all(severity in rules()[code].conditions for severity in seen)


def test_each_rule_has_a_rationale_a_measurement_and_a_repair() -> None:
    for rule in rules().values():
        assert all((rule.title, rule.rationale, rule.measurement, rule.repair, rule.references)), rule.code
        assert rule.severity in {"error", "warning"}, "the worst that it can be"


def test_facts_made_here_survive_json_as_those_of_an_observer_do() -> None:
    facts = rank(steps=(one_step_facts(1),), stepped=(replace(tensor(), numbers=update_statistics()),))
    assert RankFacts.from_dict(facts.to_dict()) == facts


@pytest.mark.parametrize(("steps", "found"), [(9, []), (10, ["error"])])
def test_a_rate_of_zero_is_an_error_only_after_as_many_steps_as_a_warm_up_would_need(steps: int, found: list[str]) -> None:
    facts = ranks(steps=step_facts(steps, rates={"AdamW": (0.0,)}, schedule_rates={}))
    assert severities("BXP401", facts) == found
