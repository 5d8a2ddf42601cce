"""Tests of the corpus itself: its table, and how the audit of a case is compared with its expectation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.audit_corpus.cases import cast, clean, mistaken
from tests.audit_corpus.environments import environment_names
from tests.audit_corpus.execution import SCRIPTS, Execution
from tests.audit_corpus.table import CASES
from tests.audit_corpus.verdicts import compare

CLEAN = clean("clean", "python", "plain.py")
CAST = cast("cast", "python", "plain.py", repair="torch.autocast")
CAST_IN_LIGHTNING = cast("cast", "python", "plain.py", repair="bf16-mixed")
RESUMED = mistaken("resumed", "masters are lost", "BXP501", "python", "resume.py")


def execution(exit_code: int | None = 0, *, weights: str = "0a", findings: list[tuple[str, str]] | None = None) -> Execution:
    """Return a run that printed its weights, with a report if it was audited."""
    lines = f"result weights {weights}\n"
    if findings is None:
        return Execution(exit_code, 2.0, lines, "", {})
    common = {"title": "", "evidence": {}, "repair": "use torch.autocast"}
    report = {"findings": [{"code": code, "severity": severity, **common} for code, severity in findings]}
    return Execution(exit_code, 3.0, json.dumps(report), lines, {})


@pytest.mark.parametrize(
    ("case", "exit_code", "findings", "verdict"),
    [
        (CLEAN, 0, [], "silent"),
        (CLEAN, 0, [("BXP302", "info")], "silent"),
        (CLEAN, 0, [("BXP602", "warning")], "false alarm"),
        (CLEAN, 4, [("BXP604", "unknown")], "false alarm"),
        (CLEAN, 1, [], "failed"),
        (CAST, 4, [("BXP101", "error"), ("BXP201", "error")], "found"),
        (CAST_IN_LIGHTNING, 4, [("BXP101", "error")], "another repair"),
        (CAST, 0, [("BXP101", "info")], "missed"),
        (CAST, 4, [("BXP201", "error")], "missed"),
        (CAST, 4, [("BXP101", "error"), ("BXP401", "error")], "false alarm"),
        (RESUMED, 4, [("BXP104", "error")], "false alarm"),
        (RESUMED, 0, [], "missed"),
    ],
)
def test_a_verdict_compares_codes_of_loud_findings(case: Any, exit_code: int, findings: Any, verdict: str) -> None:
    row = compare(case, execution(), execution(exit_code, findings=findings), None)
    assert row.verdict == verdict
    assert row.right is (verdict in ("silent", "found"))
    assert row.cpu_ratio == 1.5


def test_other_weights_make_a_right_verdict_wrong_unless_the_script_differs_from_itself() -> None:
    audited = execution(weights="0b", findings=[])
    same, different = execution(), execution(weights="0c")
    assert compare(CLEAN, execution(), audited, same).checksums_equal is False
    assert not compare(CLEAN, execution(), audited, same).right
    assert compare(CLEAN, execution(), audited, different).checksums_equal is None


def test_half_of_the_corpus_is_clean_and_its_scripts_and_environments_exist() -> None:
    share = sum(case.mistake is None for case in CASES) / len(CASES)
    assert 0.45 < share < 0.6
    assert {case.environment for case in CASES} <= set(environment_names())
    arguments = {argument for case in CASES for argument in case.command}
    for script in SCRIPTS.glob("*.*"):
        assert script.name in arguments or script.stem in ("checksums", "lerobot_dataset", "lerobot_train"), "no case runs it"
    for argument in arguments:
        assert not argument.endswith((".py", ".sh", ".json")) or (SCRIPTS / argument).exists()
