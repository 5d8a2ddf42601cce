"""An audit as text, JSON, SARIF and JUnit."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from facts_made import NORM, WEIGHT, half, rank, stepping
from rich.console import Console

from benchbox.audit.judge import judge
from benchbox.audit.rules import rules
from benchbox.audit.selection import Known, Selection, Suppression
from benchbox.report.audit import write_audit
from benchbox.report.audit.as_json import json_report
from benchbox.report.audit.junit import junit_report
from benchbox.report.audit.sarif import sarif_report
from benchbox.report.audit.text import print_audit
from benchbox.report.audit.view import Audit

if TYPE_CHECKING:
    from benchbox.measure.witness.facts import RankFacts

NASTY = "layer.\x1b[31m<&\"'\x00\n]]>weight"


def suppressing(parameters: str) -> Suppression:
    return Suppression(rule="BXP101", parameters=parameters, reason="seen by <all> & understood")


def audit(facts: list[RankFacts], **selection: Any) -> Audit:
    return Audit(
        title="python train.py: 6 steps on 2 ranks",
        told={"kind": "command", "command": ["python", "train.py"]},
        facts=facts,
        judgement=judge(facts, Selection(**selection)),
    )


def typical() -> Audit:
    """One of everything: an error, a known warning, a suppression that acts and one that does not, a rule not judged."""
    facts = stepping(half(), half(NORM), missing={"clip": "no clipping was seen"}, problems=("end: ValueError",))
    warning = next(finding for finding in judge(facts).findings if finding.code == "BXP106")
    return audit(
        facts, suppressions=(suppressing("norm.*"), suppressing("head.*")), baseline=frozenset({Known.of(warning.to_dict())})
    )


def text(found: Audit, **options: Any) -> str:
    console = Console(file=io.StringIO(), highlight=False, **options)
    print_audit(console, found)
    return console.file.getvalue()


def test_text_says_what_was_audited_what_it_holds_what_is_wrong_and_what_was_not_judged() -> None:
    lines = text(typical(), width=200).splitlines()
    assert lines[:2] == ["python train.py: 6 steps on 2 ranks", "2 ranks, stepped by AcceleratedOptimizer > AdamW"]
    assert "0-1    master  float32  cpu           1     1,000  3.91 KiB" in lines
    assert "updates of all tensors: edq 1.0000 (1 when all of them arrive), 0% lost" in lines
    assert f"BXP101 error: {rules()['BXP101'].title}" in lines
    assert "  names     backbone.weight" in lines
    assert "  ranks     0-1" in lines
    assert "found: 1 error" in lines
    assert "not judged: BXP304: no clipping was seen" in lines
    assert "suppressed: BXP101 for norm.* (seen by <all> & understood): norm.weight" in lines
    assert "suppressed: BXP101 for head.* (seen by <all> & understood): it changes nothing, take it out" in lines
    assert f"known: BXP106 warning in AdamW: {rules()['BXP106'].title}" in lines
    assert "the witness failed on rank 1: end: ValueError" in lines
    (clean,) = [line for line in lines if line.startswith("clean: ")]
    assert not {"BXP101", "BXP106", "BXP304"} & {*clean.removeprefix("clean: ").split(", ")}


def test_text_of_a_training_with_nothing_wrong_says_so() -> None:
    found = text(audit([rank()]), width=200)
    assert "found: nothing\nclean: BXP101, BXP102" in found
    assert "not judged" not in found


def test_findings_are_told_worst_first() -> None:
    facts = stepping(half(), default_dtype="bfloat16", collectives=(), reduction=None)
    severities = [line.split()[1] for line in text(audit(facts), width=200).splitlines() if line.startswith("BXP")]
    assert severities == ["error:", "warning:", "warning:"]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_text_is_wrapped_to_a_terminal_and_nothing_is_lost(width: int) -> None:
    wrapped = text(typical(), width=width, force_terminal=True, no_color=True, color_system=None, legacy_windows=False)
    assert max(len(line) for line in wrapped.splitlines()) <= width
    whole = text(typical(), width=200).replace(" ", "").replace("\n", "")
    repair = rules()["BXP101"].repair.replace(" ", "")
    assert repair in whole
    assert repair in wrapped.replace(" ", "").replace("\n", "")


def test_colour_is_for_terminals_that_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" in text(typical(), force_terminal=True, color_system="standard")
    assert "\x1b[" not in text(typical())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in text(typical(), force_terminal=True)


def test_json_is_one_object_with_everything_in_it() -> None:
    found = json.loads(json_report(typical()))
    assert found["schema_version"] == 1
    assert (found["subject"]["kind"], found["subject"]["optimizer_chain"]) == ("command", "AcceleratedOptimizer > AdamW")
    (finding,) = found["findings"]
    assert finding.keys() == {"code", "severity", "title", "where", "rank", "evidence", "repair"}
    assert (finding["code"], finding["evidence"]["names"]) == ("BXP101", [WEIGHT])
    assert found["census"][0]["kind"] == "master"
    assert found["not_judged"] == {"BXP304": "no clipping was seen"}
    assert {*found["clean"]} == rules().keys() - {"BXP101", "BXP106", "BXP304"}
    assert [each["matched"] for each in found["suppressed"]] == [1, 0]
    assert [each["code"] for each in found["known"]] == ["BXP106"]
    assert found["numbers"]["edq"] == pytest.approx(1.0)
    assert found["problems"] == [{"rank": 0, "problem": "end: ValueError"}, {"rank": 1, "problem": "end: ValueError"}]


def test_json_has_no_word_for_an_infinite_norm_and_gets_a_string() -> None:
    held = rank()
    steps = tuple(type(step)(step=step.step, reported_norm=float("inf"), max_norm=1.0, stepped_norm=2.0) for step in held.steps)
    found = json.loads(json_report(audit([rank(steps=steps)])), parse_constant=lambda word: pytest.fail(word))
    (finding,) = [each for each in found["findings"] if each["code"] == "BXP304"]
    assert finding["evidence"]["reported"] == "inf"


# What SARIF 2.1.0 requires of each object used here (OASIS standard, section 3), and the words it allows.
REQUIRED = {
    "run": {"tool"},
    "driver": {"name"},
    "rule": {"id"},
    "result": {"message"},
    "suppression": {"kind"},
    "invocation": {"executionSuccessful"},
    "notification": {"message"},
}
ALLOWED = {
    "rule": {"id", "shortDescription", "fullDescription", "help", "defaultConfiguration", "properties"},
    "result": {
        *("ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints", "properties"),
        *("baselineState", "suppressions"),
    },
    "notification": {"level", "message", "associatedRule"},
}
LEVELS = {"none", "note", "warning", "error"}


def sarif(found: Audit) -> dict[str, Any]:
    """The one run of a log, after checking it against what the standard requires."""
    log = json.loads(sarif_report(found))
    assert log.keys() == {"$schema", "version", "runs"}
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert REQUIRED["run"] <= run.keys()
    driver = run["tool"]["driver"]
    assert REQUIRED["driver"] <= driver.keys()
    for rule in driver["rules"]:
        assert REQUIRED["rule"] <= rule.keys() <= ALLOWED["rule"]
        assert rule["defaultConfiguration"]["level"] in LEVELS
        assert all(rule[part]["text"] for part in ("shortDescription", "fullDescription", "help"))
    for result in run["results"]:
        assert REQUIRED["result"] <= result.keys() <= ALLOWED["result"]
        assert result["level"] in LEVELS
        assert result["message"]["text"]
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result.get("baselineState", "new") in {"new", "unchanged", "updated", "absent"}
        assert all(each["fullyQualifiedName"] for place in result["locations"] for each in place["logicalLocations"])
        for suppression in result.get("suppressions", ()):
            assert REQUIRED["suppression"] <= suppression.keys()
            assert suppression["kind"] in {"inSource", "external"}
            assert suppression["status"] in {"accepted", "underReview", "rejected"}
    for invocation in run["invocations"]:
        assert REQUIRED["invocation"] <= invocation.keys()
        assert isinstance(invocation["executionSuccessful"], bool)
        for each in invocation["toolExecutionNotifications"]:
            assert REQUIRED["notification"] <= each.keys() <= ALLOWED["notification"]
            assert each["level"] in LEVELS
    return run


def test_sarif_has_every_rule_and_a_result_for_each_finding_with_its_parameters() -> None:
    run = sarif(typical())
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [*rules()]
    error, known, suppressed = run["results"]
    assert (error["ruleId"], error["level"], error["baselineState"]) == ("BXP101", "error", "new")
    assert [place["logicalLocations"][0]["fullyQualifiedName"] for place in error["locations"]] == [WEIGHT]
    assert "AReaL#1634" in error["message"]["text"]
    assert error["properties"]["evidence"]["ranks"] == [0, 1]
    assert (known["ruleId"], known["level"], known["baselineState"]) == ("BXP106", "warning", "unchanged")
    assert suppressed["suppressions"][0]["justification"] == "seen by <all> & understood"
    told = [each["message"]["text"] for each in run["invocations"][0]["toolExecutionNotifications"]]
    assert told[0] == "BXP304 could not be judged: no clipping was seen"
    assert run["invocations"][0]["executionSuccessful"] is False, "the witness failed"


def test_sarif_without_a_baseline_compares_nothing() -> None:
    run = sarif(audit(stepping(half())))
    assert all("baselineState" not in result for result in run["results"])
    assert run["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]


def test_a_finding_has_the_same_fingerprint_when_only_its_numbers_differ() -> None:
    some, other = (
        sarif(audit(stepping(half(update_dot=3e-3 * share))))["results"][1]["partialFingerprints"] for share in (0.1, 0.2)
    )
    assert some == other
    assert some != sarif(audit(stepping(half(NORM, update_dot=3e-4))))["results"][1]["partialFingerprints"]


def test_what_is_unknown_is_an_error_where_a_format_has_no_word_for_it() -> None:
    facts = [rank(stepped=(), problems=("begin: KeyError",), missing={"stepped": "the witness failed"})]
    (result,) = sarif(audit(facts))["results"]
    assert (result["level"], result["properties"]["severity"]) == ("error", "unknown")
    failure = ET.fromstring(junit_report(audit(facts))).find(".//failure")
    assert failure is not None
    assert failure.get("type") == "unknown"


def junit(found: Audit) -> tuple[ET.Element, dict[str, ET.Element]]:
    """(the suite, its test cases by code)."""
    root = ET.fromstring(junit_report(found))
    assert root.tag == "testsuites"
    (suite,) = root
    assert suite.tag == "testsuite"
    return suite, {str(case.get("name")).split()[0]: case for case in suite.iter("testcase")}


def test_junit_has_a_case_for_each_rule_that_fails_is_skipped_or_passes() -> None:
    suite, cases = junit(typical())
    assert cases.keys() == rules().keys()
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "30",
        "failures": "1",
        "errors": "0",
        "skipped": "1",
    }
    failure, skipped = cases["BXP101"].find("failure"), cases["BXP304"].find("skipped")
    assert failure is not None
    assert skipped is not None
    assert failure.get("message") == rules()["BXP101"].title
    assert WEIGHT in str(failure.text)
    assert "repair: " in str(failure.text)
    assert skipped.get("message") == "no clipping was seen"
    assert list(cases["BXP102"]) == []
    assert all(case.get("classname") and case.get("time") for case in cases.values())


def test_junit_passes_a_warning_and_tells_it() -> None:
    _, cases = junit(audit([rank(default_dtype="bfloat16")]))
    assert cases["BXP603"].find("failure") is None
    assert str(cases["BXP603"].findtext("system-out")).startswith("warning: torch's default dtype")


def test_junit_has_only_the_rules_that_were_selected() -> None:
    _, cases = junit(audit([rank()], select=("BXP2",)))
    assert {*cases} == {"BXP201", "BXP202", "BXP203", "BXP204", "BXP205"}


def test_names_from_outside_may_hold_anything() -> None:
    """Escapes of a terminal, markup, and characters that XML may not have: each format shows them as text."""
    found = audit(stepping(half(NASTY)), suppressions=(suppressing("*nothing\x07"),))
    escaped = "layer.\\x1b[31m<&\"'\\x00\\n]]>weight"
    printed = text(found, width=300)
    assert escaped in printed
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert json.loads(json_report(found))["findings"][0]["evidence"]["names"] == [NASTY]
    (location,) = sarif(found)["results"][0]["locations"]
    assert location["logicalLocations"][0]["fullyQualifiedName"] == escaped
    _, cases = junit(found)
    assert escaped in str(cases["BXP101"].findtext("failure"))


@pytest.mark.parametrize(("form", "begins"), [("text", "python"), ("json", "{"), ("sarif", "{"), ("junit", "<?xml")])
def test_each_format_is_printed_on_stdout_alone(capsys: pytest.CaptureFixture[str], form: str, begins: str) -> None:
    found = typical()
    write_audit(form, found.title, found.told, found.facts, found.judgement)
    printed = capsys.readouterr()
    assert printed.out.startswith(begins)
    assert printed.err == ""
