"""The ranks of a report: a sentence for a cell in which one stands out, and a strip for every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.analysis.summary import summarize
from benchbox.registry.phases import STEP_PARTS
from benchbox.report.markdown import render_markdown
from benchbox.report.ranks import MAX_STRIPS, rank_section
from benchbox.report.view import build_report
from tests.support.example_run import CELL, example_record, example_run

ZERO = replace(CELL, backend="zero2")


def split(late_s=0.0, steps=12):
    """Return a split in which rank 1 computes longer and rank 0 waits for it."""
    own = {"data_wait": 0.005, "compute": 0.05, "core_wait": 0.002, "rank_wait": 0.003, "transfer": 0.01}
    late = {(1, "compute"): late_s, (0, "rank_wait"): late_s}
    times = {part: [[own[part] + late.get((rank, part), 0.0)] * steps for rank in range(2)] for part in STEP_PARTS}
    return {part: {"per_rank": per_rank} for part, per_rank in times.items()}


def run_and_records(*cells_and_splits):
    records = [example_record(cell) | {"step_split_s": value} for cell, value in cells_and_splits]
    return replace(example_run([CELL]), cells={r["cell_id"]: r["cell"] for r in records}), records


def section(*cells_and_splits):
    return rank_section(summarize(*run_and_records(*cells_and_splits)), ["backend"])


def test_the_slow_rank_of_one_cell_is_named_and_every_rank_has_a_strip():
    ranks = section((CELL, split(0.05)), (ZERO, split()))
    assert ranks.sentences == ("backend=ddp: rank 1 computed 100% longer than the others: 50.0 ms a step.",)
    assert [group.name for group in ranks.chart.groups] == ["backend=ddp", "backend=zero2"]
    bars = ranks.chart.groups[0].bars
    assert [bar.name for bar in bars] == ["rank 0", "rank 1"]
    lengths = [sum(segment.width for segment in bar.segments) for bar in bars]
    assert lengths[0] == pytest.approx(lengths[1]), "ranks end a step together"


def test_the_sentences_stand_in_the_markdown_too():
    text = render_markdown(build_report(*run_and_records((CELL, split(0.05)), (ZERO, split()))))
    assert "## Ranks" in text
    assert "- backend=ddp: rank 1 computed 100% longer than the others: 50.0 ms a step." in text


def test_of_many_cells_only_those_with_a_sentence_are_drawn():
    cells = [(replace(CELL, seed=seed), split(0.05 if seed == 3 else 0.0)) for seed in range(MAX_STRIPS)]
    assert [len(group.bars) for group in section(*cells).chart.groups] == [2]


def test_records_without_a_split_have_no_section():
    assert section((CELL, None)) is None
