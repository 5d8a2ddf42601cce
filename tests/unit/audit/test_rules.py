from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchbox.audit.facts import Census, Opaque, SteppedTensor
from benchbox.audit.findings import failing, finding_lines
from benchbox.audit.rules import rules, run_rules

TENSOR = SteppedTensor(
    name="head.weight",
    optimizer="AdamW",
    dtype="float32",
    device="cpu",
    elements=64,
    live=True,
    betas=(0.9, 0.999),
    state={"exp_avg": "float32", "exp_avg_sq": "float32"},
)


def census(*tensors, rank=0, opaque=()):
    return Census(rank=rank, optimizer_chain=("AdamW",), entries=(), stepped=tensors, opaque=tuple(opaque))


def found(*censuses):
    return [(finding.code, finding.severity) for finding in run_rules(censuses)]


def bf16(**changes):
    return replace(TENSOR, dtype="bfloat16", **changes)


def bf16_state(beta2):
    return replace(TENSOR, betas=(0.9, beta2), state={"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"})


def test_float32_is_clean():
    assert found(census(TENSOR)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_101_fires_on_16_bit_stepped_tensors(dtype):
    assert found(census(replace(TENSOR, dtype=dtype))) == [("BXP101", "error")]


def test_101_lets_compensated_tensors_pass_and_only_warns_of_adapters():
    assert found(census(bf16(compensation="stochastic rounding"))) == []
    assert found(census(bf16(name="layers.0.lora_A.weight"))) == [("BXP101", "warning")]
    mixed = census(bf16(name="layers.0.lora_A.weight"), bf16())
    assert sorted(found(mixed)) == [("BXP101", "error"), ("BXP101", "warning")]


@pytest.mark.parametrize(
    ("beta2", "severity"),
    [
        (0.999, "error"),
        (1 - 2**-9, "error"),
        (0.998, "warning"),
        (0.997, "warning"),
        (1 - 2**-8, None),
        (0.996, None),
        (0.95, None),
    ],
)
def test_201_severity_follows_beta2(beta2, severity):
    assert found(census(bf16_state(beta2))) == ([("BXP201", severity)] if severity else [])


@pytest.mark.parametrize("beta2", [0.999, 0.998, 0.996])
def test_201_says_what_bfloat16_really_does(beta2):
    """The rule's bounds against the arithmetic: all mantissas stall, some do, none does."""
    v = torch.linspace(1, 2, 129, dtype=torch.float64)[:-1].to(torch.bfloat16)  # every mantissa
    stalled = (v * beta2 == v).float().mean().item()
    severity = dict(found(census(bf16_state(beta2)))).get("BXP201")
    assert severity == ("error" if stalled == 1 else "warning" if stalled > 0 else None)


def test_201_keeps_groups_of_different_beta2_apart():
    findings = run_rules([census(bf16_state(0.999), bf16_state(0.9985), bf16_state(0.9))])
    assert [finding.evidence["beta2"] for finding in findings] == [0.9985, 0.999]


def test_evidence_of_all_ranks_is_one_finding():
    many = [bf16(name=f"layers.{index}.weight") for index in range(12)]
    (finding,) = run_rules([census(*many[:2], rank=1), census(*many, rank=3)])
    assert finding.rank == 1
    assert finding.evidence["ranks"] == [1, 3]
    assert finding.evidence["dtypes"] == ["bfloat16"]
    assert (finding.evidence["tensors"], finding.evidence["elements"]) == (12, 12 * 64), "of the rank that holds most"
    assert finding.evidence["names"] == [f"layers.{index}.weight" for index in range(10)] + ["and 2 more"]


def test_an_empty_shard_proves_nothing():
    assert found(census(bf16(elements=0))) == []


def test_what_cannot_be_read_is_unknown_for_every_rule_and_does_not_pass():
    findings = run_rules([census(opaque=[Opaque(optimizer="Duck", reason="steps in secret")], rank=rank) for rank in (0, 1)])
    assert [finding.code for finding in findings] == list(rules())
    assert {finding.severity for finding in findings} == {"unknown"}
    assert findings[0].evidence == {"reason": "steps in secret", "ranks": [0, 1]}
    assert len(failing([finding.to_dict() for finding in findings])) == len(rules())


def test_a_warning_does_not_fail_an_audit():
    findings = [finding.to_dict() for finding in run_rules([census(bf16_state(0.998))])]
    assert findings
    assert failing(findings) == []


def test_findings_are_plain_json_and_readable_lines():
    (finding,) = run_rules([census(bf16())])
    values = json.loads(json.dumps(finding.to_dict()))
    assert values == finding.to_dict()
    text = "\n".join(finding_lines(values))
    for part in ("BXP101 error", "AdamW", "head.weight", "bfloat16", rules()["BXP101"].repair):
        assert part in text


def test_every_rule_says_why_how_and_what_to_do():
    assert list(rules()) == ["BXP101", "BXP201"]
    for rule in rules().values():
        assert all((rule.title, rule.why, rule.measured, rule.repair, rule.references))
