"""Tests of an audit for people: subject, census, findings, and rules without findings, on any terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from benchbox.audit.selection import Selection
from benchbox.observer.facts import CensusEntry, SourceLocation
from benchbox.report.audit.text import print_audit
from tests.support.audits import audit, hostile, pure, suppressing, unreadable, with_baseline
from tests.support.facts import HALF_MOMENTS, half, rank, ranks, ranks_stepping, reduction

if TYPE_CHECKING:
    from benchbox.report.audit.view import Audit

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


def printed(report: Audit, **options: Any) -> str:
    stream = io.StringIO()
    print_audit(Console(file=stream, highlight=False, **options), report)
    return stream.getvalue()


ALONE = Selection(ignore=("BXP101",))  # the consequences of which are then findings of their own


def lines(report: Audit) -> list[str]:
    return printed(report).splitlines()


def headings(report: Audit) -> list[str]:
    return [line.split(":")[0] for line in lines(report) if line.startswith("BXP")]


def test_it_begins_with_the_subject_and_its_optimizers():
    assert lines(audit(pure()))[:2] == ["train.py: 6 steps seen", "2 ranks, stepped by AcceleratedOptimizer > AdamW"]
    assert lines(audit([rank(0, optimizer_chain=())]))[1] == "1 rank"


def test_ranks_with_equal_entries_share_a_row_of_the_census():
    entry = CensusEntry(rank=0, kind="exp_avg", dtype="bfloat16", device="cuda:0", tensors=3, elements=4096, bytes=8192)
    uneven = [rank(index, entries=(replace(entry, rank=index),)) for index in range(4)]
    uneven[2] = rank(2, entries=(replace(entry, rank=2, elements=1, bytes=2),))
    rows = [line.split() for line in lines(audit(uneven)) if "exp_avg" in line]
    assert rows == [
        ["0,", "1,", "3", "exp_avg", "bfloat16", "cuda:0", "3", "4,096", "8.00", "KiB"],
        ["2", "exp_avg", "bfloat16", "cuda:0", "3", "1", "2", "B"],
    ]
    assert any(line.startswith("0-1 ") for line in lines(audit(ranks()))[:5])


def test_the_worst_finding_comes_first():
    opaque = unreadable()[0].opaque
    facts = [replace(rank_facts, opaque=opaque) for rank_facts in pure(collectives=(reduction("bfloat16"),), reduction=None)]
    assert headings(audit(facts)) == [
        "BXP101 error",
        "BXP604 unknown",
        "BXP302 info",
    ]


def test_consequences_are_lines_of_their_cause_and_count_as_findings():
    text = printed(audit(pure()))
    finding = text[text.index("BXP101 error") :].split("\n\n")[0].splitlines()
    consequences = [line.split(maxsplit=1)[1] for line in finding if line.split()[0] == "consequence"]
    assert consequences == [
        "BXP201 error: the second moment is bfloat16 and cannot decay (beta2: 0.999)",
        "BXP106 warning: weight decay is lost to rounding (lr x weight decay: 0.0001; least that arrives: 0.00195312)",
    ]
    assert "found: 2 errors, 1 warning" in text


def test_consequences_are_lines_of_the_finding_at_their_own_place():
    facts = ranks(stepped=tuple(half(optimizer=name, state=HALF_MOMENTS) for name in ("AdamW", "Adam")))
    assert printed(audit(facts)).count("BXP201 error: the second moment is bfloat16") == 2


def test_a_finding_has_its_place_its_numbers_and_the_repair():
    text = printed(audit(pure(), ALONE))
    finding = text[text.index("BXP201 error") :].split("\n\n")[0].splitlines()
    assert [re.split(r"  +", line.strip(), maxsplit=1) for line in finding[1:]] == [
        ["where", "AdamW"],
        ["state", "exp_avg_sq in bfloat16"],
        ["beta2", "0.999"],
        ["ranks", "0-1"],
        ["dtypes", "bfloat16"],
        ["tensors", "2"],
        ["elements", "2,000"],
        ["names", "backbone.weight, norm.weight"],
        ["repair", "keep optimizer state in float32 (recipe bf16_master), or lower beta2 to 0.995 or less"],
    ]


def test_a_finding_has_the_lines_that_led_to_it_relative_to_the_working_directory():
    locations = (
        SourceLocation(kind="optimizer", name="AdamW", file=str(Path.cwd() / "train.py"), line=18, function="build"),
        SourceLocation(kind="cast", name="Net to bfloat16", file="/far/net.py", line=8, function="__init__"),
        SourceLocation(kind="schedule", name="LinearLR", file="/far/net.py", line=9, function="__init__"),
    )
    text = lines(audit(pure(locations=locations)))
    found = [re.split(r"  +", line.strip(), maxsplit=1) for line in text if " at  " in line]
    assert found == [
        ["cast at", "/far/net.py:8 in __init__ (Net to bfloat16)"],
        ["optimizer built at", "train.py:18 in build (AdamW)"],
    ]


def test_a_repair_that_several_findings_share_is_printed_once():
    two_optimizers = [replace(facts, stepped=(*facts.stepped, half("head", optimizer="SGD"))) for facts in pure()]
    text = printed(audit(two_optimizers))
    assert text.count("shard float32 parameters") == 1
    assert "as for BXP101" in text


def test_values_with_commas_are_separated_by_semicolons():
    declared = [replace(rank_facts, contract=ranks()[0].contract) for rank_facts in pure()]
    expected = "stepped: float32 declared, bfloat16 measured; moments: float32 declared, bfloat16 measured"
    assert expected in printed(audit(declared))


def test_eleven_names_are_ten_and_one_more():
    assert "layer9 and 1 more" in printed(audit(ranks_stepping(*(half(f"layer{index}") for index in range(11)))))


def test_the_effect_of_the_steps_is_printed_even_if_nothing_is_wrong():
    assert "over all tensors: edq 1.0000 (1 when every update arrives), 0% of updates lost" in lines(audit(ranks()))
    stalled = pure(stepped=(half(update_dot=1.5e-3, updates_lost=1500, second_moment_stalled=0.95),))
    assert (
        "over all tensors: edq 0.5000 (1 when every update arrives), 50.0% of updates lost, 95.0% of the 16-bit second "
        "moments cannot decay"
    ) in lines(audit(stalled))
    checkpoint = pure(stepped=(half(updates=0, update_squared=0.0, second_moment_stalled=1.0),))
    assert "over all tensors: 100% of the 16-bit second moments cannot decay" in lines(audit(checkpoint))
    assert not any(line.startswith("over all") for line in lines(audit(ranks(stepped=()))))


def test_it_ends_with_the_findings_the_clean_rules_and_those_not_judged():
    missing = {"buffers": "no model was found", "products": "no model was found", "loads": "it was late"}
    end = printed(audit(pure(missing=missing))).split("\n\n")[-1].splitlines()
    assert end[0] == "found: 2 errors, 1 warning"
    assert end[1].startswith("clean: BXP102, BXP103, ")
    assert end[2:] == [
        "not judged: BXP503: it was late",
        "not judged: BXP601, BXP602: no model was found",
    ]
    assert "found: nothing" in lines(audit(ranks()))


def test_suppressed_tensors_are_listed_with_the_reason_and_a_suppression_without_effect_is_reported():
    report = audit(pure(), suppressing("BXP201", "*"))
    assert "suppressed: BXP201 for * (known since May): backbone.weight, norm.weight" in printed(report)
    assert "suppressed: BXP103 for gone.* (known since May): it has no effect, remove it" in printed(
        audit(pure(), suppressing("BXP103", "gone.*"))
    )
    abbreviated = audit(ranks_stepping(*(half(f"layer{index}") for index in range(13))), suppressing("BXP101", "layer*"))
    assert "layer9 and 3 more" in printed(abbreviated)


def test_a_finding_of_the_baseline_is_listed_but_is_no_new_finding():
    report = audit(pure(), with_baseline(pure(), "BXP201"))
    assert "known: BXP201 error in AdamW: the second moment is bfloat16 and cannot decay" in lines(report)
    assert headings(report) == ["BXP101 error"]


def test_a_failure_of_the_observer_is_reported_with_its_rank():
    facts = [rank(0), rank(1, problems=("a look at step 2: KeyError: 'exp_avg'",))]
    assert lines(audit(facts))[-1] == "the observer failed on rank 1: a look at step 2: KeyError: 'exp_avg'"


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_in_names_are_escaped(terminal):
    text = printed(audit(hostile()), force_terminal=terminal, color_system=None, width=200)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert r"\x1b[31m[red]\n\x00</testcase>" in text


@pytest.mark.parametrize("width", [20, 40, 62, 80, 120])
def test_lines_fit_a_terminal_of_any_width_and_lose_no_word(width):
    report = audit(pure(), suppressing("BXP103", "gone.*"))
    text = printed(report, force_terminal=True, width=width, color_system=None)
    assert max(map(len, text.splitlines())) <= width
    unwrapped = printed(report)
    findings, expected = (output[output.index("over all") :] for output in (text, unwrapped))
    assert "".join(findings.split()) == "".join(expected.split())


def test_wrapped_lines_are_indented():
    text = printed(audit(pure()), force_terminal=True, width=80, color_system=None).splitlines()
    start = next(index for index, line in enumerate(text) if line.startswith("  repair "))
    column = text[start].index("shard")
    assert text[start + 1][:column].isspace()
    assert not text[start + 1][column].isspace()


def test_output_that_is_no_terminal_is_not_wrapped():
    long = [line for line in lines(audit(pure())) if line.startswith("  repair") and "float32 parameters" in line]
    assert long[0].endswith("0.838 at 6e-6)")


def test_only_terminals_that_accept_colours_get_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[1;31mBXP101 error" in printed(audit(pure()), force_terminal=True, color_system="standard")
    assert "\x1b[1;33mBXP106 warning" in printed(audit(pure(), ALONE), force_terminal=True, color_system="standard")
    assert "\x1b" not in printed(audit(pure()))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not COLOUR.search(printed(audit(pure()), force_terminal=True))


def test_many_names_of_one_form_are_folded_and_counted():
    text = printed(audit(ranks_stepping(*(half(f"layers.{index}.weight") for index in range(30)))))
    assert "30 tensors: layers.0-29.weight" in text
