"""Tests of an audit for programs: JSON that is a baseline for the next audit, SARIF and JUnit as their readers require them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchbox.audit.judge import judge
from benchbox.audit.rules import rules
from benchbox.audit.selection import Selection, load_baseline
from benchbox.errors import EXIT_CELL_FAILED
from benchbox.observer.facts import SourceLocation
from benchbox.report.audit import write_audit
from benchbox.report.audit.as_json import json_report
from benchbox.report.audit.junit import junit_report
from benchbox.report.audit.sarif import sarif_report
from tests.support.audits import HOSTILE, audit, hostile, pure, suppressing, unreadable, with_baseline
from tests.support.facts import half, rank, ranks, ranks_stepping, step_facts
from tests.support.sarif import check_shape, parse_strict


def sarif(*args: Any, **subject: Any) -> dict[str, Any]:
    log: dict[str, Any] = parse_strict(sarif_report(audit(*args, **subject)))
    check_shape(log, "log")
    return dict(log["runs"][0])


def results(*args: Any, **subject: Any) -> dict[str, dict[str, Any]]:
    return {result["ruleId"]: result for result in sarif(*args, **subject)["results"]}


def junit(*args: Any) -> ET.Element:
    (suite,) = ET.fromstring(junit_report(audit(*args)))
    return suite


def case(suite: ET.Element, code: str) -> ET.Element:
    (matching,) = (element for element in suite.iter("testcase") if element.attrib["name"].startswith(code))
    return matching


def uris(run: dict[str, Any]) -> set[str]:
    locations = [location for result in run["results"] for location in result["locations"]]
    return {item["physicalLocation"]["artifactLocation"]["uri"] for item in locations if "physicalLocation" in item}


def test_json_is_one_object_of_version_1():
    report = parse_strict(json_report(audit(pure(problems=("it fell",)), suppressing("BXP103", "gone.*"))))
    assert report["schema_version"] == 1
    assert report["subject"]["kind"] == "command"
    assert report["subject"]["optimizer_chain"] == "AcceleratedOptimizer > AdamW"
    parts = {"code", "severity", "title", "where", "rank", "evidence", "repair", "cause", "locations"}
    assert [finding.keys() for finding in report["findings"]] == [parts] * 3
    causes = [(finding["code"], finding["cause"]) for finding in report["findings"]]
    assert causes == [("BXP101", None), ("BXP201", "BXP101"), ("BXP106", "BXP101")]
    assert [(entry["rank"], entry["kind"], entry["elements"]) for entry in report["census"]] == [
        (0, "master", 1000),
        (1, "master", 1000),
    ]
    assert report["numbers"]["edq"] == pytest.approx(1.0)
    assert report["problems"] == [{"rank": 0, "problem": "it fell"}, {"rank": 1, "problem": "it fell"}]
    (suppressed,) = report["suppressed"]
    assert (suppressed["code"], suppressed["reason"], suppressed["matched"]) == ("BXP103", "known since May", 0)
    assert {*report["clean"], *report["not_judged"]} == rules().keys() - {"BXP101", "BXP106", "BXP201"}


def test_json_is_the_baseline_of_the_next_audit(tmp_path):
    (tmp_path / "before.json").write_text(json_report(audit(pure())))
    again = Selection(baseline=load_baseline(tmp_path / "before.json"))
    assert judge(pure(), again).findings == ()
    (tmp_path / "again.json").write_text(json_report(audit(pure(), again)))
    assert load_baseline(tmp_path / "again.json") == again.baseline, "findings of the baseline stay in the baseline"


def test_an_infinite_norm_is_valid_json():
    facts = ranks(steps=step_facts(reported_norm=float("inf"), stepped_norm=2.0))
    (finding,) = parse_strict(json_report(audit(facts)))["findings"]
    assert (finding["code"], finding["evidence"]["reported"]) == ("BXP304", "inf")
    sarif(facts)


def test_sarif_describes_every_rule_and_points_results_at_them():
    run = sarif(pure())
    described = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in described] == list(rules())
    assert all(rule["help"]["text"].startswith("Measured: ") for rule in described)
    assert [(result["ruleId"], result["level"]) for result in run["results"]] == [
        ("BXP101", "error"),
        ("BXP201", "error"),
        ("BXP106", "warning"),
    ]
    assert all(described[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])


def test_sarif_names_the_parameters_and_the_script_they_are_in():
    run = sarif(pure())
    assert [location["logicalLocations"] for location in run["results"][0]["locations"]] == [
        [{"fullyQualifiedName": "backbone.weight", "kind": "member"}],
        [{"fullyQualifiedName": "norm.weight", "kind": "member"}],
    ]
    assert uris(run) == {"train.py"}
    assert "edq: 1" in run["results"][0]["message"]["text"]
    assert run["results"][0]["properties"]["evidence"]["ranks"] == [0, 1]


CAST = SourceLocation(
    kind="cast",
    name="Net to bfloat16",
    file=str(Path.cwd() / "my nets" / "net.py"),
    line=8,
    function="__init__",
    stack=("/far/in in/net.py:8 in <lambda>", "/far/train.py:30 in main"),
)
BUILT = SourceLocation(kind="optimizer", name="AdamW", file="/far/train.py", line=31, function="main")


def test_sarif_points_at_the_line_of_the_cast_and_relates_the_others_with_their_stacks():
    result = results(pure(locations=(BUILT, CAST)))["BXP101"]
    assert {str(location["physicalLocation"]) for location in result["locations"]} == {
        str({"artifactLocation": {"uri": "my%20nets/net.py"}, "region": {"startLine": 8}})
    }
    assert [item["message"]["text"] for item in result["relatedLocations"]] == [
        "cast at my nets/net.py:8 in __init__ (Net to bfloat16)",
        "optimizer built at /far/train.py:31 in main (AdamW)",
    ]
    assert result["relatedLocations"][1]["physicalLocation"]["region"] == {"startLine": 31}
    frames = [frame["location"] for frame in result["stacks"][0]["frames"]]
    assert [frame["logicalLocations"][0]["fullyQualifiedName"] for frame in frames] == ["<lambda>", "main"]
    lines = [(at["artifactLocation"]["uri"], at["region"]["startLine"]) for at in (f["physicalLocation"] for f in frames)]
    assert lines == [("file:///far/in%20in/net.py", 8), ("file:///far/train.py", 30)]


@pytest.mark.parametrize(
    ("subject", "uri"),
    [
        (
            {"kind": "command", "command": ["accelerate", "launch", str(Path.cwd() / "my runs" / "train.py")]},
            "my%20runs/train.py",
        ),
        ({"kind": "checkpoint", "path": "runs/last.pt"}, "runs/last.pt"),
        ({"kind": "checkpoint", "path": "/far/last\udcff.pt"}, "file:///far/last%FF.pt"),
        ({"kind": "command", "command": ["python", "-m", "package.train"]}, None),
        ({"kind": "session", "cell": {}}, None),
    ],
)
def test_results_have_the_uri_of_the_file_if_there_is_one(subject, uri):
    assert uris(sarif(pure(), **subject)) == ({uri} if uri else set())


def test_a_command_that_failed_fails_for_programs_although_no_rule_fires():
    failed = replace(audit(ranks()), failure="the command failed: exit code 7")
    log = parse_strict(sarif_report(failed))
    check_shape(log, "log")
    (invocation,) = log["runs"][0]["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, EXIT_CELL_FAILED)
    assert {"level": "error", "message": {"text": failed.failure}} in invocation["toolExecutionNotifications"]
    (suite,) = ET.fromstring(junit_report(failed))
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("0", "1")
    assert case(suite, "the subject ran").find("error").attrib["message"] == failed.failure
    assert int(suite.attrib["tests"]) == len(suite.findall("testcase")) == 1 + int(junit(ranks()).attrib["tests"])
    assert parse_strict(json_report(failed))["failure"] == failed.failure


def test_a_subject_that_ran_has_no_failure_for_programs():
    (invocation,) = sarif(ranks())["invocations"]
    assert invocation["executionSuccessful"]
    assert "exitCode" not in invocation
    assert junit(ranks()).attrib["errors"] == "0"


def test_an_unknown_optimizer_is_an_error_for_programs_too():
    assert results(unreadable())["BXP604"]["level"] == "error"
    suite = junit(unreadable())
    assert suite.attrib["failures"] == "1"
    assert case(suite, "BXP604").find("failure").attrib["type"] == "unknown"


def test_sarif_keeps_suppressed_results_with_the_reason_and_reports_suppressions_without_effect():
    result = results(pure(), suppressing("BXP201", "*.weight"))["BXP201"]
    assert result["suppressions"] == [{"kind": "external", "status": "accepted", "justification": "known since May"}]
    assert [location["logicalLocations"][0]["fullyQualifiedName"] for location in result["locations"]] == [
        "backbone.weight",
        "norm.weight",
    ]
    assert "BXP103" not in results(pure(), suppressing("BXP103", "gone.*"))
    (invocation,) = sarif(pure(), suppressing("BXP103", "gone.*"))["invocations"]
    assert any("BXP103 for gone.*" in note["message"]["text"] for note in invocation["toolExecutionNotifications"])


def test_sarif_gives_all_results_a_baseline_state_or_none():
    selection = with_baseline(pure(), "BXP201")
    by_code = results(pure(), Selection(baseline=selection.baseline, suppressions=suppressing("BXP106", "*").suppressions))
    states = {code: result["baselineState"] for code, result in by_code.items()}
    assert states == {"BXP101": "new", "BXP201": "unchanged", "BXP106": "new"}
    assert all("baselineState" not in result for result in sarif(pure())["results"])


def test_the_fingerprint_of_a_finding_does_not_depend_on_measured_values():
    earlier, later = results(ranks_stepping(half(update_dot=1e-3))), results(ranks_stepping(half(update_dot=1.1e-3)))
    assert earlier["BXP102"]["message"] != later["BXP102"]["message"]
    assert earlier["BXP102"]["partialFingerprints"] == later["BXP102"]["partialFingerprints"]
    another = results(ranks_stepping(half("another.weight", update_dot=1e-3)))
    assert earlier["BXP102"]["partialFingerprints"] != another["BXP102"]["partialFingerprints"]


def test_sarif_reports_rules_not_judged_and_failures_of_the_observer():
    (invocation,) = sarif([rank(0), rank(1, missing={"loads": "it was late"}, problems=("it fell",))])["invocations"]
    assert not invocation["executionSuccessful"]
    *notes, failure = [(note["level"], note["message"]["text"]) for note in invocation["toolExecutionNotifications"]]
    assert ("note", "BXP503 could not be judged: it was late") in notes
    assert ("note", "BXP101 could not be judged: the observer failed on rank 1: it fell") in notes
    assert failure == ("warning", "the observer failed on rank 1: it fell")
    assert sarif(ranks())["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]


def test_junit_has_a_case_for_every_rule_and_counts_them():
    suite = junit(pure(missing={"loads": "it was late"}))
    assert [element.attrib["name"].split()[0] for element in suite.iter("testcase")] == list(rules())
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": len(rules()), "failures": 2, "errors": 0, "skipped": 1}
    assert {element.attrib["name"][:6] for element in suite.iter("testcase") if element.find("failure") is not None} == {
        "BXP101",
        "BXP201",
    }
    assert case(suite, "BXP503").find("skipped").attrib["message"] == "it was late"
    failure = case(suite, "BXP201").find("failure")
    assert failure.attrib == {"type": "error", "message": rules()["BXP201"].title}
    assert "names: backbone.weight, norm.weight" in failure.text
    assert "repair: keep optimizer state in float32" in failure.text
    assert case(suite, "BXP106").find("system-out").text.startswith("warning: weight decay is lost")


def test_junit_has_no_case_for_a_rule_that_was_not_selected():
    suite = junit(pure(), Selection(select=("BXP2",), ignore=("BXP205",)))
    assert [element.attrib["name"][:6] for element in suite.iter("testcase")] == ["BXP201", "BXP202", "BXP203", "BXP204"]


def test_junit_passes_findings_of_the_baseline_and_suppressed_ones_and_reports_them():
    in_baseline = case(junit(pure(), with_baseline(pure(), "BXP201")), "BXP201")
    assert in_baseline.find("failure") is None
    assert in_baseline.find("system-out").text.startswith("known: the second moment is bfloat16")
    suppressed = case(junit(pure(), suppressing("BXP201", "*")), "BXP201")
    assert suppressed.find("failure") is None
    assert "known since May" in suppressed.find("system-out").text
    partly = case(junit(pure(), suppressing("BXP201", "norm.*")), "BXP201")
    assert "names: backbone.weight" in partly.find("failure").text


def test_a_warning_that_fails_the_audit_is_a_failed_case_of_junit():
    (suite,) = ET.fromstring(junit_report(audit(pure()), warnings=True))
    assert case(suite, "BXP106").find("failure").attrib["type"] == "warning"
    assert suite.attrib["failures"] == "3"


def test_junit_reports_failures_of_the_observer():
    assert junit(ranks(problems=("it fell",))).find("system-err").text == (
        "the observer failed on rank 0: it fell\nthe observer failed on rank 1: it fell"
    )


def test_names_are_escaped_in_every_format(capsys):
    """They cannot end a document, a line or the colour of a terminal."""
    facts, command = hostile(), [HOSTILE, "train.py"]
    output = {}
    for form in ("json", "sarif", "junit", "text"):
        write_audit(form, HOSTILE, {"kind": "command", "command": command}, facts, judge(facts))
        output[form] = capsys.readouterr().out
        assert all(char.isprintable() or char == "\n" for char in output[form]), form
    assert parse_strict(output["json"])["subject"]["command"] == command
    assert parse_strict(output["sarif"])["runs"][0]["properties"]["subject"]["command"] == command
    (suite,) = ET.fromstring(output["junit"])
    assert r"names: \x1b[31m[red]\n\x00</testcase>" in case(suite, "BXP101").find("failure").text


@pytest.mark.parametrize(("form", "begins"), [("text", "train.py"), ("json", "{"), ("sarif", "{"), ("junit", "<?xml")])
def test_each_format_is_printed_on_stdout_alone(capsys, form, begins):
    report = audit(pure())
    write_audit(form, report.title, report.subject, report.facts, report.judgement)
    printed = capsys.readouterr()
    assert printed.out.startswith(begins)
    assert printed.err == ""
