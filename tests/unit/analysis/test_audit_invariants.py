"""Numbers and findings of the audit agree with its census."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.example_run import CELL, example_record
from tests.support.record_corruptions import FINDINGS, NUMBERS
from tests.unit.analysis.test_invariants import violations


@pytest.mark.parametrize(
    ("number", "value", "most"),
    [("edq", 2.5, 2), ("edq", -0.5, 2), ("updates_lost", -3.0, 1), ("updates_lost", 1.1, 1), ("second_moment_stalled", 2.0, 1)],
)
def test_numbers_of_the_audit_beyond_their_definitions(number, value, most):
    record = example_record()
    record["precision"]["numbers"][number] = value
    assert violations(record) == [(NUMBERS, f"{number} is {value}, and by its definition between 0 and {most}")]


def test_rounding_at_random_may_move_weights_by_more_than_their_updates():
    record = example_record(replace(CELL, recipe="bf16_stochastic"))
    record["precision"]["numbers"]["edq"] = 2.5
    assert violations(record) == []


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero2"])
def test_16_bit_state_in_the_census_without_its_findings(backend):
    record = example_record(replace(CELL, backend=backend, recipe="bf16_pure"))
    record["precision"]["numbers"]["edq"] = 0.61
    findings = [{"code": code} for code in ("BXP101", "BXP202")]
    lost = {"code": "BXP102", "evidence": {"edq": 0.61}}
    record["precision"]["findings"] = [*findings, lost]
    assert violations(record) == []
    record["precision"]["findings"] = []
    assert violations(record) == [
        (FINDINGS, "second moments in bfloat16 in the census, and no finding BXP201 or BXP202"),
        (FINDINGS, "the optimizer steps bfloat16 in the census, and no finding BXP101"),
    ]
    record["precision"] |= {"findings": [*findings, lost], "numbers": {"edq": 1.0}}
    assert violations(record) == [(FINDINGS, "edq is 1.0, and 0.61 in finding BXP102")]


@pytest.mark.parametrize("backend", ["ddp", "zero2", "zero3", "fsdp1_full", "fsdp2"])
@pytest.mark.parametrize("change", [-10, 1])
def test_more_or_fewer_parameters_than_the_census_has(backend, change):
    record = example_record(replace(CELL, backend=backend))
    assert violations(record) == []
    record["observed"]["total_numel"] += change
    sentence = "parameters of the census are those of the policy"
    messages = [message for broken, message in violations(record) if broken == sentence]
    counted = 4002 if backend in ("ddp", "zero2") else 2001
    copies = 2 if backend in ("ddp", "zero2") else 1
    expected = f"{counted} elements of parameters in the census of all ranks, and {copies} x {2001 + change} are observed"
    assert messages == [expected]
    del record["observed"]["trainable_numel"]
    assert sentence not in [broken for broken, _ in violations(record)], "an older record has no number of all parameters"
