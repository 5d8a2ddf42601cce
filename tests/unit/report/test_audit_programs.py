"""An audit for programs: JSON that the next audit can start from, SARIF and JUnit as their readers demand them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchbox.audit.judge import judge
from benchbox.audit.rules import rules
from benchbox.audit.selection import Selection, load_baseline
from benchbox.report.audit import write_audit
from benchbox.report.audit.as_json import json_report
from benchbox.report.audit.junit import junit_report
from benchbox.report.audit.sarif import sarif_report
from tests.support.audits import HOSTILE, audit, hostile, knowing, pure, suppressing, unreadable
from tests.support.facts import courses, half, rank, ranks, stepping

# What the SARIF 2.1.0 schema says of the objects used here. An exclamation mark: the standard demands it. No other property
# may stand there (additionalProperties: false), so whoever writes a new one looks it up and adds it.
SHAPES: dict[str, dict[str, Any]] = {
    "log": {"$schema": str, "version!": {"2.1.0"}, "runs!": ["run"]},
    "run": {
        "tool!": "tool",
        "automationDetails": "automation",
        "invocations": ["invocation"],
        "results": ["result"],
        "properties": dict,
    },
    "tool": {"driver!": "driver"},
    "driver": {"name!": str, "version": str, "rules": ["rule"]},
    "rule": {
        "id!": str,
        "shortDescription": "text",
        "fullDescription": "text",
        "help": "text",
        "defaultConfiguration": "configuration",
        "properties": dict,
    },
    "configuration": {"level": {"none", "note", "warning", "error"}},
    "text": {"text!": str},
    "automation": {"id": str},
    "invocation": {"executionSuccessful!": bool, "toolExecutionNotifications": ["notification"]},
    "notification": {
        "message!": "text",
        "level": {"none", "note", "warning", "error"},
        "associatedRule": "descriptor",
    },
    "descriptor": {"id": str, "index": int},
    "result": {
        "message!": "text",
        "ruleId": str,
        "ruleIndex": int,
        "level": {"none", "note", "warning", "error"},
        "locations": ["location"],
        "partialFingerprints": dict,
        "suppressions": ["suppression"],
        "baselineState": {"new", "unchanged", "updated", "absent"},
        "properties": dict,
    },
    "location": {"physicalLocation": "physical", "logicalLocations": ["logical"]},
    "physical": {"artifactLocation": "artifact"},
    "artifact": {"uri": str},
    "logical": {"fullyQualifiedName": str, "kind": str},
    "suppression": {
        "kind!": {"inSource", "external"},
        "status": {"accepted", "underReview", "rejected"},
        "justification": str,
    },
}


def conforms(held: Any, shape: Any, where: str = "log") -> None:
    """Walk through a SARIF log and refuse what the standard does not know or misses."""
    if isinstance(shape, list):
        assert isinstance(held, list), where
        for place, each in enumerate(held):
            conforms(each, shape[0], f"{where}[{place}]")
    elif isinstance(shape, set):
        assert held in shape, where
    elif isinstance(shape, type):
        assert isinstance(held, shape), where
    else:
        known = {name.rstrip("!"): (name.endswith("!"), kind) for name, kind in SHAPES[shape].items()}
        assert held.keys() <= known.keys(), where
        for name, (demanded, kind) in known.items():
            assert name in held or not demanded, f"{where}.{name}"
            if name in held:
                conforms(held[name], kind, f"{where}.{name}")


def strict(text: str) -> Any:
    """JSON as the standard has it: Python would also read NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def sarif(*args: Any, **told: Any) -> dict[str, Any]:
    log: dict[str, Any] = strict(sarif_report(audit(*args, **told)))
    conforms(log, "log")
    return dict(log["runs"][0])


def results(*args: Any, **told: Any) -> dict[str, dict[str, Any]]:
    return {each["ruleId"]: each for each in sarif(*args, **told)["results"]}


def junit(*args: Any) -> ET.Element:
    (suite,) = ET.fromstring(junit_report(audit(*args)))
    return suite


def case(suite: ET.Element, code: str) -> ET.Element:
    (found,) = (each for each in suite.iter("testcase") if each.attrib["name"].startswith(code))
    return found


def uris(run: dict[str, Any]) -> set[str]:
    places = [place for result in run["results"] for place in result["locations"]]
    return {place["physicalLocation"]["artifactLocation"]["uri"] for place in places if "physicalLocation" in place}


def test_json_is_one_object_of_version_1():
    held = strict(json_report(audit(pure(problems=("it fell",)), suppressing("BXP103", "gone.*"))))
    assert held["schema_version"] == 1
    assert held["subject"]["kind"] == "command"
    assert held["subject"]["optimizer_chain"] == "AcceleratedOptimizer > AdamW"
    parts = {"code", "severity", "title", "where", "rank", "evidence", "repair"}
    assert [finding.keys() for finding in held["findings"]] == [parts] * 3
    assert [finding["code"] for finding in held["findings"]] == ["BXP101", "BXP201", "BXP106"]
    assert [(entry["rank"], entry["kind"], entry["elements"]) for entry in held["census"]] == [
        (0, "master", 1000),
        (1, "master", 1000),
    ]
    assert held["numbers"]["edq"] == pytest.approx(1.0)
    assert held["problems"] == [{"rank": 0, "problem": "it fell"}, {"rank": 1, "problem": "it fell"}]
    (suppressed,) = held["suppressed"]
    assert (suppressed["code"], suppressed["reason"], suppressed["matched"]) == ("BXP103", "known since May", 0)
    assert {*held["clean"], *held["not_judged"]} == rules().keys() - {"BXP101", "BXP106", "BXP201"}


def test_json_is_the_baseline_of_the_next_audit(tmp_path):
    (tmp_path / "before.json").write_text(json_report(audit(pure())))
    again = Selection(baseline=load_baseline(tmp_path / "before.json"))
    assert judge(pure(), again).findings == ()
    (tmp_path / "again.json").write_text(json_report(audit(pure(), again)))
    assert load_baseline(tmp_path / "again.json") == again.baseline, "what was known stays known"


def test_an_infinite_norm_is_no_reason_for_broken_json():
    facts = ranks(steps=courses(reported_norm=float("inf"), stepped_norm=float("inf")))
    (finding,) = strict(json_report(audit(facts)))["findings"]
    assert (finding["code"], finding["evidence"]["reported"]) == ("BXP304", "inf")
    sarif(facts)


def test_sarif_describes_every_rule_and_points_results_at_them():
    run = sarif(pure())
    described = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in described] == list(rules())
    assert all(rule["help"]["text"].startswith("Measured: ") for rule in described)
    assert [(each["ruleId"], each["level"]) for each in run["results"]] == [
        ("BXP101", "error"),
        ("BXP201", "error"),
        ("BXP106", "warning"),
    ]
    assert all(described[each["ruleIndex"]]["id"] == each["ruleId"] for each in run["results"])


def test_sarif_names_the_parameters_and_the_script_they_are_in():
    run = sarif(pure())
    assert [place["logicalLocations"] for place in run["results"][0]["locations"]] == [
        [{"fullyQualifiedName": "backbone.weight", "kind": "member"}],
        [{"fullyQualifiedName": "norm.weight", "kind": "member"}],
    ]
    assert uris(run) == {"train.py"}
    assert "edq: 1" in run["results"][0]["message"]["text"]
    assert run["results"][0]["properties"]["evidence"]["ranks"] == [0, 1]


@pytest.mark.parametrize(
    ("told", "uri"),
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
def test_a_file_is_named_where_there_is_one(told, uri):
    assert uris(sarif(pure(), **told)) == ({uri} if uri else set())


def test_an_unknown_optimizer_is_an_error_for_programs_too():
    assert results(unreadable())["BXP604"]["level"] == "error"
    suite = junit(unreadable())
    assert suite.attrib["failures"] == "1"
    assert case(suite, "BXP604").find("failure").attrib["type"] == "unknown"


def test_sarif_keeps_what_was_suppressed_with_the_reason_and_tells_what_is_out_of_date():
    held = results(pure(), suppressing("BXP201", "*.weight"))["BXP201"]
    assert held["suppressions"] == [{"kind": "external", "status": "accepted", "justification": "known since May"}]
    assert [place["logicalLocations"][0]["fullyQualifiedName"] for place in held["locations"]] == [
        "backbone.weight",
        "norm.weight",
    ]
    (invocation,) = sarif(pure(), suppressing("BXP103", "gone.*"))["invocations"]
    assert any("BXP103 for gone.*" in note["message"]["text"] for note in invocation["toolExecutionNotifications"])


def test_sarif_says_of_every_result_or_of_none_how_it_stands_to_a_baseline():
    selection = knowing(pure(), "BXP201")
    held = results(pure(), Selection(baseline=selection.baseline, suppressions=suppressing("BXP106", "*").suppressions))
    states = {code: each["baselineState"] for code, each in held.items()}
    assert states == {"BXP101": "new", "BXP201": "unchanged", "BXP106": "new"}
    assert all("baselineState" not in each for each in sarif(pure())["results"])


def test_sarif_recognises_a_finding_whatever_was_measured_this_time():
    first, later = results(stepping(half(update_dot=1e-3))), results(stepping(half(update_dot=1.1e-3)))
    assert first["BXP102"]["message"] != later["BXP102"]["message"]
    assert first["BXP102"]["partialFingerprints"] == later["BXP102"]["partialFingerprints"]
    other = results(stepping(half("another.weight", update_dot=1e-3)))
    assert first["BXP102"]["partialFingerprints"] != other["BXP102"]["partialFingerprints"]


def test_sarif_says_what_could_not_be_judged_and_where_the_observer_failed():
    (invocation,) = sarif([rank(0), rank(1, missing={"loads": "it was late"}, problems=("it fell",))])["invocations"]
    assert not invocation["executionSuccessful"]
    assert [(note["level"], note["message"]["text"]) for note in invocation["toolExecutionNotifications"]] == [
        ("note", "BXP503 could not be judged: it was late"),
        ("warning", "the observer failed on rank 1: it fell"),
    ]
    assert sarif(ranks())["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]


def test_junit_has_a_case_for_every_rule_and_counts_them():
    suite = junit(pure(missing={"loads": "it was late"}))
    assert [each.attrib["name"].split()[0] for each in suite.iter("testcase")] == list(rules())
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": len(rules()), "failures": 2, "errors": 0, "skipped": 1}
    assert {each.attrib["name"][:6] for each in suite.iter("testcase") if each.find("failure") is not None} == {
        "BXP101",
        "BXP201",
    }
    assert case(suite, "BXP503").find("skipped").attrib["message"] == "it was late"
    failure = case(suite, "BXP201").find("failure")
    assert failure.attrib == {"type": "error", "message": rules()["BXP201"].title}
    assert "names: backbone.weight, norm.weight" in failure.text
    assert "repair: keep optimizer state in float32" in failure.text
    assert case(suite, "BXP106").find("system-out").text.startswith("warning: weight decay is lost")


def test_junit_has_no_case_for_a_rule_that_was_not_asked_for():
    suite = junit(pure(), Selection(select=("BXP2",), ignore=("BXP205",)))
    assert [each.attrib["name"][:6] for each in suite.iter("testcase")] == ["BXP201", "BXP202", "BXP203", "BXP204"]


def test_junit_lets_pass_what_is_known_or_suppressed_and_tells_so():
    known = case(junit(pure(), knowing(pure(), "BXP201")), "BXP201")
    assert known.find("failure") is None
    assert known.find("system-out").text.startswith("known: the second moment is bfloat16")
    suppressed = case(junit(pure(), suppressing("BXP201", "*")), "BXP201")
    assert suppressed.find("failure") is None
    assert "known since May" in suppressed.find("system-out").text
    partly = case(junit(pure(), suppressing("BXP201", "norm.*")), "BXP201")
    assert "names: backbone.weight" in partly.find("failure").text


def test_junit_tells_what_the_observer_failed_at():
    assert junit(ranks(problems=("it fell",))).find("system-err").text == (
        "the observer failed on rank 0: it fell\nthe observer failed on rank 1: it fell"
    )


def test_names_are_data_in_every_format(capsys):
    """They end no document, no line and no terminal's colour."""
    facts, command = hostile(), [HOSTILE, "train.py"]
    read = {}
    for form in ("json", "sarif", "junit", "text"):
        write_audit(form, HOSTILE, {"kind": "command", "command": command}, facts, judge(facts))
        read[form] = capsys.readouterr().out
        assert all(each.isprintable() or each == "\n" for each in read[form]), form
    assert strict(read["json"])["subject"]["command"] == command
    assert strict(read["sarif"])["runs"][0]["properties"]["subject"]["command"] == command
    (suite,) = ET.fromstring(read["junit"])
    assert r"names: \x1b[31m[red]\n\x00</testcase>" in case(suite, "BXP101").find("failure").text


@pytest.mark.parametrize(("form", "begins"), [("text", "train.py"), ("json", "{"), ("sarif", "{"), ("junit", "<?xml")])
def test_each_format_is_printed_on_stdout_alone(capsys, form, begins):
    shown = audit(pure())
    write_audit(form, shown.title, shown.subject, shown.facts, shown.judgement)
    printed = capsys.readouterr()
    assert printed.out.startswith(begins)
    assert printed.err == ""
