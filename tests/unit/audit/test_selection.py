"""Tests of selected rules, suppressed parameters, and findings of an earlier audit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchbox.audit.judge import judge
from benchbox.audit.rules import rule, rules
from benchbox.audit.selection import Selection, Suppression, load_baseline, load_suppressions, parse_codes
from benchbox.errors import ConfigurationError
from tests.support.facts import NORM, WEIGHT, average, half, ranks, ranks_stepping, tensor

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.audit.judge import Judgement

REASON = "its updates are large: EDQ 0.99 over the whole run"


def fired(judgement: Judgement) -> dict[str, list[str]]:
    return {finding.code: finding.evidence.get("names", []) for finding in judgement.findings}


def suppressing(pattern: str, code: str = "BXP101") -> Selection:
    return Selection(suppressions=(Suppression(rule=code, parameters=pattern, reason=REASON),))


def test_select_and_ignore_accept_codes_and_families() -> None:
    facts = ranks_stepping(half())
    assert set(fired(judge(facts))) == {"BXP101", "BXP106"}
    assert set(fired(judge(facts, Selection(select=("BXP106", "BXP2"))))) == {"BXP106"}
    assert set(fired(judge(facts, Selection(ignore=("BXP10",))))) == set()
    judgement = judge(facts, Selection(select=("BXP1",), ignore=("BXP101",)))
    assert {*judgement.clean, *fired(judgement)} == {"BXP102", "BXP103", "BXP104", "BXP105", "BXP106", "BXP107"}


def test_codes_are_parsed_from_lists_in_any_case_and_unknown_ones_are_refused() -> None:
    assert parse_codes(["bxp101, BXP2,", " ", "BXP3"], "--select") == ("BXP101", "BXP2", "BXP3")
    with pytest.raises(ConfigurationError, match="--select: no rule is called 'BXP109'; did you mean 'BXP10"):
        parse_codes(["BXP109"], "--select")


def test_a_rule_is_found_by_its_code_and_another_is_suggested() -> None:
    assert rule("bxp101") is rules()["BXP101"]
    with pytest.raises(ConfigurationError, match="unknown rule 'BXP1O1'; did you mean 'BXP101'"):
        rule("BXP1O1")


def test_a_code_that_is_near_none_is_refused_with_the_command_that_lists_the_rules(tmp_path: Path) -> None:
    file = tmp_path / "audit.yaml"
    file.write_text(f"suppress: [{{rule: BXP999, parameters: '*', reason: '{REASON}'}}]")
    for refused in (lambda: rule("BXP999"), lambda: parse_codes(["BXP999"], "--select"), lambda: load_suppressions(file)):
        with pytest.raises(ConfigurationError, match=r"'BXP999'; see benchbox list rules$"):
            refused()


def test_a_suppression_acts_on_the_parameters_it_names_and_says_which() -> None:
    facts = ranks_stepping(half(), half(NORM))
    judgement = judge(facts, suppressing("norm.*"))
    assert fired(judgement)["BXP101"] == [WEIGHT]
    assert fired(judgement)["BXP106"] == [WEIGHT, NORM], "another rule still reports it"
    (suppressed,) = judgement.suppressed
    assert (suppressed.code, suppressed.names, suppressed.matched, suppressed.reason) == ("BXP101", (NORM,), 1, REASON)


@pytest.mark.parametrize("pattern", ["EMA", "backbone.*"], ids=["its name", "its parameter"])
def test_an_average_is_suppressed_by_its_name_or_its_parameter(pattern: str) -> None:
    facts = ranks(averages=(average(),))
    assert "BXP107" in fired(judge(facts))
    judgement = judge(facts, suppressing(pattern, "BXP107"))
    assert "BXP107" in judgement.clean
    (suppressed,) = judgement.suppressed
    assert (suppressed.names, suppressed.matched) == ((WEIGHT,), 1)


def test_a_suppression_of_all_leaves_the_rule_clean() -> None:
    judgement = judge(ranks_stepping(half()), suppressing("*"))
    assert "BXP101" in judgement.clean
    assert judgement.failing() == ()


def test_a_suppression_lists_only_what_the_rule_would_have_named() -> None:
    """Not every tensor and buffer that its pattern matches."""
    (suppressed,) = judge(ranks_stepping(half(), tensor(NORM)), suppressing("*")).suppressed
    assert (suppressed.names, suppressed.matched) == ((WEIGHT,), 1)
    (suppressed,) = judge(ranks_stepping(*(half(f"layer{i}") for i in range(13))), suppressing("*")).suppressed
    assert (len(suppressed.names), suppressed.matched) == (10, 13)


@pytest.mark.parametrize(
    ("pattern", "tensors"),
    [("head.*", [half()]), ("norm.*", [half(), tensor(NORM)])],
    ids=["no such parameter", "nothing is wrong with it"],
)
def test_a_suppression_that_changes_nothing_is_out_of_date(pattern, tensors) -> None:
    (suppressed,) = judge(ranks_stepping(*tensors), suppressing(pattern)).suppressed
    assert (suppressed.matched, suppressed.names) == (0, ())


def test_a_partition_is_suppressed_only_with_all_the_parameters_in_it() -> None:
    facts = ranks_stepping(half("Zero.partition[0]", covers=(WEIGHT, NORM)))
    assert "BXP101" in fired(judge(facts, suppressing(WEIGHT)))
    assert "BXP101" not in fired(judge(facts, suppressing("*.weight")))


def test_suppressions_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.yaml"
    path.write_text(f'suppress:\n  - {{rule: BXP101, parameters: "*.norm.weight", reason: "{REASON}"}}\n')
    assert load_suppressions(path) == (Suppression(rule="BXP101", parameters="*.norm.weight", reason=REASON),)


def test_a_suppression_names_its_rule_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "audit.yaml").write_text(f'suppress:\n  - {{rule: bxp101, parameters: "*", reason: "{REASON}"}}\n')
    assert [suppression.rule for suppression in load_suppressions(tmp_path / "audit.yaml")] == ["BXP101"]


def test_every_problem_in_a_file_of_suppressions_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.yaml"
    path.write_text(
        "suppress:\n"
        '  - {rule: BXP101, parameters: "*"}\n'
        f'  - {{rule: BXP101, parametres: "*", reason: "{REASON}"}}\n'
        '  - {rule: BXP101, parameters: "*", reason: ""}\n'
    )
    with pytest.raises(ConfigurationError) as error:
        load_suppressions(path)
    lines = str(error.value).splitlines()
    assert f"{path}:2:" in lines[0]
    assert "reason" in lines[0]
    assert any(f"{path}:3:" in line and "did you mean 'parameters'" in line for line in lines)
    assert any(f"{path}:4:" in line for line in lines)


def test_an_unknown_rule_in_a_file_of_suppressions_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.yaml"
    path.write_text(f'suppress:\n  - {{rule: BXP1, parameters: "*", reason: "{REASON}"}}\n')
    with pytest.raises(ConfigurationError, match=r"audit\.yaml:2:\d+: unknown rule 'BXP1'"):
        load_suppressions(path)


def baseline(path: Path, judgement: Judgement) -> Selection:
    """Write the report of `--format json`, and return a selection with it as the baseline."""
    report = {
        "findings": [finding.to_dict() for finding in judgement.findings],
        "known": [finding.to_dict() for finding in judgement.baseline_findings],
    }
    path.write_text(json.dumps(report))
    return Selection(baseline=load_baseline(path))


def test_findings_of_the_baseline_are_reported_as_such_and_do_not_fail(tmp_path: Path) -> None:
    facts = ranks_stepping(half())
    earlier = baseline(tmp_path / "a.json", judge(facts))
    judgement = judge(facts, earlier)
    assert (judgement.findings, judgement.failing()) == ((), ())
    assert [finding.code for finding in judgement.baseline_findings] == ["BXP101", "BXP106"]
    assert not {"BXP101", "BXP106"} & {*judgement.clean, *judgement.not_judged}
    again = baseline(tmp_path / "b.json", judgement)
    assert judge(facts, again).findings == (), "findings of the baseline stay in the baseline"


def test_a_parameter_that_is_new_in_a_finding_makes_it_new(tmp_path: Path) -> None:
    earlier = baseline(tmp_path / "a.json", judge(ranks_stepping(half(NORM))))
    assert "BXP101" in judge(ranks_stepping(half(NORM), half()), earlier).failing()
    fewer = baseline(tmp_path / "b.json", judge(ranks_stepping(half(NORM), half())))
    assert judge(ranks_stepping(half()), fewer).failing() == ()


def test_a_finding_that_became_worse_is_new(tmp_path: Path) -> None:
    some = half(update_dot=3e-3 * 0.7)
    most = half(update_dot=3e-3 * 0.1)
    earlier = baseline(tmp_path / "a.json", judge(ranks_stepping(some)))
    assert judge(ranks_stepping(most), earlier).failing() == ("BXP102",)


@pytest.mark.parametrize(("before", "now", "new"), [(15, 15, False), (15, 12, False), (15, 16, True)])
def test_parameters_that_are_only_counted_are_compared_by_their_number(tmp_path: Path, before, now, new) -> None:
    earlier = baseline(tmp_path / "a.json", judge(ranks_stepping(*(half(f"layer{i}") for i in range(before)))))
    for numbers in (range(now), reversed(range(now))):
        judgement = judge(ranks_stepping(*(half(f"layer{i}") for i in numbers)), earlier)
        assert ("BXP101" in judgement.failing()) is new


@pytest.mark.parametrize("text", ["{}", '{"findings": 3}', '{"findings": ["BXP101"]}', "not JSON"])
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="--baseline"):
        load_baseline(path)


def test_only_errors_and_what_is_unknown_fail_an_audit() -> None:
    warned = judge(ranks(default_dtype="bfloat16"))
    assert ([finding.severity for finding in warned.findings], warned.failing()) == (["warning"], ())
