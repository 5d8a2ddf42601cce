"""A gate and a comparison for programs: JUnit, SARIF and annotations at the line of the threshold."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from benchbox.analysis.gate import GateRow, gate
from benchbox.analysis.regression import BaselineLookup
from benchbox.analysis.summary import summarize
from benchbox.report.comparison.sarif import render_sarif
from benchbox.report.gate.github import render_gate_github
from benchbox.report.gate.junit import render_gate_junit
from benchbox.report.gate.sarif import render_gate_sarif
from benchbox.report.gate.text import print_gate
from benchbox.report.gate.view import GateView, threshold_lines
from tests.support.example_run import CELL, example_record, example_run
from tests.support.sarif import check_shape, parse_strict
from tests.unit.report.test_comparison import COMPARISON

MATRIX = Path("matrices/fsdp_vs_zero2.yaml")
HOSTILE = "backend=\x1b[31m<b>"


def row(verdict: str, threshold: int | None = 1, **changes) -> GateRow:
    values = {"cell_id": verdict, "cell": "backend=zero2", "metric": "step_time_s", "expected": "<= 1 s", "actual": "2 s"}
    return GateRow(verdict=verdict, threshold=threshold, **values | changes)  # type: ignore[arg-type]


ROWS = [
    row("ok"),
    row("breach", cell=HOSTILE),
    row("missing", threshold=None, metric="status", note="it has not run"),
    row("inconclusive", note="100% sure: no, not at all"),
    row("warning"),
    row("accepted", note="accepted until 2026-12-31: slow disk"),
]
VIEW = GateView(path="runs/example", rows=ROWS, file="matrices/example.yaml", lines={-1: 3, 1: 7})


def sarif_results(view: GateView) -> list[dict]:
    log = parse_strict(render_gate_sarif(view))
    check_shape(log, "log")
    (run,) = log["runs"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    return run["results"]


def test_what_is_excused_is_noted_and_does_not_fail():
    assert [row.verdict for row in VIEW.failing] == ["breach", "missing", "inconclusive"]
    assert VIEW.noted == [*VIEW.failing, *ROWS[4:]]


def test_a_note_that_several_rows_share_is_printed_once():
    stream = io.StringIO()
    print_gate(GateView(path="r", rows=[row("missing", cell=cell, note="run it") for cell in "ab"]), Console(file=stream))
    assert stream.getvalue().count("note: run it") == 1


def test_sarif_has_a_result_at_the_line_of_each_threshold_that_is_not_met():
    results = sarif_results(VIEW)
    assert [result["level"] for result in results] == ["error", "error", "note", "warning", "note"]
    regions = [result["locations"][0]["physicalLocation"] for result in results]
    assert [region["region"]["startLine"] for region in regions] == [7, 3, 7, 7, 7]
    assert {region["artifactLocation"]["uri"] for region in regions} == {"matrices/example.yaml"}
    assert all(result["message"]["text"].isprintable() for result in results)
    (suppressed,) = (result for result in results if "suppressions" in result)
    assert suppressed["suppressions"][0]["justification"].endswith("slow disk")


def test_sarif_of_a_ratio_is_in_the_file_of_its_test():
    ratio = row("breach", threshold=None, metric="loop_over_bare", file="tests/perf/test_loop.py")
    (result,) = sarif_results(replace(VIEW, rows=[ratio], file=None))
    assert result["locations"][0]["physicalLocation"] == {"artifactLocation": {"uri": "tests/perf/test_loop.py"}}


def test_sarif_without_the_matrix_has_logical_locations_alone():
    results = sarif_results(replace(VIEW, file=None, lines={}))
    assert all("physicalLocation" not in result["locations"][0] for result in results)


def test_sarif_of_a_comparison_has_what_is_worse_or_not_settled():
    log = parse_strict(render_sarif(COMPARISON, "matrices/example.yaml", 4))
    check_shape(log, "log")
    results = log["runs"][0]["results"]
    assert [(result["ruleId"], result["level"]) for result in results] == [
        ("global_samples_per_s", "error"),
        ("status", "warning"),
    ]
    assert results[0]["locations"][0]["physicalLocation"]["region"] == {"startLine": 4}


def test_junit_fails_what_fails_the_check_and_skips_what_is_not_settled():
    (suite,) = ET.fromstring(render_gate_junit(VIEW))
    assert {name: suite.attrib[name] for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6",
        "failures": "2",
        "errors": "0",
        "skipped": "1",
    }
    assert [child.tag for case in suite.iter("testcase") for child in case] == [
        "system-out",
        "failure",
        "failure",
        "skipped",
        "system-out",
        "system-out",
    ]


def test_annotations_are_at_the_threshold_worst_first_and_escaped():
    lines = render_gate_github(VIEW).splitlines()
    assert lines[0].startswith("::error file=matrices/example.yaml,line=7,title=step_time_s%3A breach::")
    assert [line.split()[0] for line in lines[:-1]] == ["::error", "::error", "::warning", "::notice", "::notice"]
    assert "100%25 sure: no, not at all" in lines[3]
    assert lines[-1] == "benchbox check runs/example: breach (1 ok, 1 breach, 1 missing, 1 inconclusive, 1 warning, 1 accepted)"


def test_rows_know_the_threshold_that_demands_them():
    run = example_run(
        [CELL], thresholds=[{"metric": "step_time_s", "max": 1}, {"metric": "mfu", "where": {"cams": 9}, "min": 0}]
    )
    records = [example_record(launch=launch) for launch in (1, 2)]
    assert [row.threshold for row in gate(run, summarize(run, records), BaselineLookup(None, None))] == [None, 0, 1]


def test_lines_are_those_of_the_matrix_unless_it_has_changed(tmp_path):
    thresholds = [{"metric": "status"}, {"metric": "global_samples_per_s"}]
    lines = threshold_lines(MATRIX, thresholds)
    text = MATRIX.read_text().splitlines()
    assert text[lines[0] - 1].strip() == "- {metric: status, expect: ok}"
    assert text[lines[1] - 1].strip().startswith("- {metric: global_samples_per_s")
    assert text[lines[-1] - 1] == "axes:"
    assert threshold_lines(MATRIX, thresholds[::-1]) == {}
    assert threshold_lines(tmp_path / "absent.yaml", thresholds) == {}


@pytest.mark.parametrize("name", ["junit", "sarif", "github", "json"])
def test_every_format_of_check_is_printed_alone(name, tmp_path):
    from typer.testing import CliRunner

    from benchbox.cli.app import app
    from tests.support.example_run import write_example

    text = CliRunner().invoke(app, ["check", str(write_example(tmp_path / "run").path), "--format", name]).stdout
    if name in ("sarif", "json"):
        json.loads(text)
    elif name == "junit":
        ET.fromstring(text)
    else:
        assert text.startswith("::error ")


def test_a_note_of_several_lines_stays_one_annotation_without_control_characters():
    note = "50%\r\n::error ::no \x1b[2J\u2028"
    (line, summary) = render_gate_github(replace(VIEW, rows=[row("breach", note=note)])).splitlines()
    assert line.endswith("breach: 50%25%0D%0A::error ::no \\x1b[2J\\u2028")
    assert summary.startswith("benchbox check ")
    (line, _) = render_gate_github(replace(VIEW, rows=[row("breach")], file=None)).splitlines()
    assert line.startswith("::error title=step_time_s%3A breach::")
