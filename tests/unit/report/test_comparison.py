"""A comparison in every format."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from benchbox.analysis.changes import Change, RunComparison
from benchbox.report.comparison.github import render_github
from benchbox.report.comparison.html import render_html
from benchbox.report.comparison.junit import render_junit
from benchbox.report.comparison.markdown import MAX_BYTES, render_markdown

GONE = "gone | 50%"
SLOWER = Change(
    cell_id="a",
    cell="backend=ddp",
    metric="global_samples_per_s",
    unit="samples/s",
    base=100.0,
    head=90.0,
    verdict="regression",
    ratio=0.9,
    low=0.88,
    high=0.92,
    launches=(5, 5),
)
CHANGES = (
    SLOWER,
    Change(
        cell_id="b",
        cell="backend=<b>",
        metric="status",
        unit="text",
        base="ok",
        head="missing",
        verdict="missing",
        reason=GONE,
    ),
    replace(SLOWER, cell="backend=zero2", head=100.5, ratio=1.005, low=0.99, high=1.01, verdict="neutral"),
)
COMPARISON = RunComparison(
    base="old", head="new", changes=CHANGES, differences=("torch 2.12 against 2.13",), relevant=0.02, needed=5
)
VERDICTS = ("regression", "missing", "incomparable", "inconclusive", "improvement", "neutral")
EVERY_VERDICT = replace(COMPARISON, changes=tuple(replace(SLOWER, cell=f"cell={name}", verdict=name) for name in VERDICTS))


def test_markdown_has_the_answer_first_and_hides_what_did_not_change():
    lines = render_markdown(COMPARISON).splitlines()
    assert lines[0] == "**new against old: 1 of 2 settled figures are worse (1 regression, 1 missing, 1 neutral).**"
    figures = "100.0 samples/s | 90.00 samples/s | 0.900x (0.880x to 0.920x) | regression |"
    assert f"| backend=ddp | global\\_samples\\_per\\_s | {figures}" in lines
    assert "The runs also differ in torch 2.12 against 2.13." in lines
    assert "- gone \\| 50%" in lines
    hidden = lines[lines.index("<details><summary>1 figure did not change</summary>") :]
    assert any("backend=zero2" in line for line in hidden)
    assert "backend=\\<b\\>" in "\n".join(lines), "input is escaped"
    assert lines[-1].startswith("A change of at most 2% is none.")


def test_where_no_figure_is_settled_none_is_said_not_to_be_worse():
    unsettled = replace(COMPARISON, changes=CHANGES[1:2])
    assert render_markdown(unsettled).startswith("**new against old: no figure is settled (1 missing).**")


@pytest.mark.parametrize(
    ("render", "headings"),
    [
        (render_html, ('id="changed"', 'id="unsettled"', 'id="neutral"')),
        (render_markdown, ("### Changes", "### Not settled", "<details>")),
    ],
)
def test_every_figure_is_below_the_heading_of_its_verdict(render, headings):
    _, *sections = re.split("|".join(headings), render(EVERY_VERDICT))
    assert [re.findall(r"cell=(\w+)", section) for section in sections] == [
        ["regression", "improvement"],
        ["missing", "incomparable", "inconclusive"],
        ["neutral"],
    ]


def test_markdown_of_thousands_of_changes_fits_into_a_comment_of_github():
    text = render_markdown(replace(COMPARISON, changes=CHANGES * 500))
    assert len(text.encode()) < MAX_BYTES + 200
    assert "The rest does not fit into a comment" in text
    assert text.startswith("**new against old: 500 of 1000 settled figures are worse")


def test_a_comment_that_is_cut_within_what_is_hidden_says_so_outside_of_it():
    lines = render_markdown(replace(COMPARISON, changes=(*CHANGES, *CHANGES[2:] * 1000))).splitlines()
    assert lines[-3:] == ["</details>", "", "The rest does not fit into a comment: `benchbox compare` prints it."]
    assert lines.count("</details>") == 1
    assert "</details>" not in render_markdown(replace(COMPARISON, changes=CHANGES[:2] * 500))


def test_junit_fails_a_regression_and_skips_what_is_not_settled():
    suite = ET.fromstring(render_junit(COMPARISON)).find("testsuite")
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped")} == {
        "tests": "3",
        "failures": "1",
        "skipped": "1",
    }
    failed, skipped, passed = suite.findall("testcase")
    assert "0.900x (0.880x to 0.920x): regression" in failed.find("failure").get("message")
    assert skipped.find("skipped").get("message").endswith("missing: gone | 50%")
    assert passed.find("failure") is passed.find("skipped") is None


def test_github_annotates_the_axes_of_the_matrix_and_escapes_what_ends_a_command():
    first, second, *_ = render_github(replace(COMPARISON, changes=CHANGES[::-1]), "matrices/a,b.yaml", 12).splitlines()
    assert first.startswith("::error file=matrices/a%2Cb.yaml,line=12,title=global_samples_per_s%3A regression::backend=ddp")
    assert second.startswith("::warning ")
    assert second.endswith("missing: gone | 50%25")
    assert "neutral" not in first + second
    assert render_github(COMPARISON, None, None).startswith("::error title=")


def test_github_warns_of_what_cannot_be_compared_and_notes_what_launches_do_not_settle():
    text = render_github(EVERY_VERDICT, None, None)
    assert re.findall(r"^::(\w+) title=global_samples_per_s%3A (\w+)::cell=\2:", text, flags=re.MULTILINE) == [
        ("error", "regression"),
        ("warning", "missing"),
        ("warning", "incomparable"),
        ("notice", "inconclusive"),
    ]


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "a & b"])
def test_html_escapes_input_and_needs_nothing_from_elsewhere(text):
    page = render_html(replace(COMPARISON, head=text))
    assert text not in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
    assert page.index('id="changed"') < page.index('id="unsettled"') < page.index('id="neutral"')
    assert '<span data-verdict="regression">regression</span>' in page


def test_runs_without_figures_in_common_say_so():
    text = render_markdown(replace(COMPARISON, changes=()))
    assert text.startswith("**old and new have no figures to compare.**\n")
