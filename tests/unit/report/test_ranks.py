"""The ranks of a report: a sentence for a cell in which one stands out, and a strip for every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.analysis.summary import summarize
from benchbox.registry.phases import STEP_PARTS
from benchbox.report.figures.cells import ReportCells
from benchbox.report.figures.rank_strips import MAX_STRIPS, PARTS, drawings
from benchbox.report.markdown import render_markdown
from benchbox.report.ranks import MAX_WAITS, rank_section
from benchbox.report.view import build_report
from tests.support.example_run import CELL, example_record, example_run
from tests.support.figure_svg import drawn_bars, texts_of

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


def figures(*cells_and_splits):
    summaries = summarize(*run_and_records(*cells_and_splits))
    return list(drawings(ReportCells(summaries=summaries, axes=["backend"], max_bars=40)))


def test_the_slow_rank_of_one_cell_is_named():
    ranks = section((CELL, split(0.05)), (ZERO, split()))
    assert ranks.sentences == ("backend=ddp: rank 1 computed 100% longer than the others: 50.0 ms a step.",)


def test_every_rank_has_a_strip_whose_parts_have_colours_hatches_and_a_legend():
    (figure,) = figures((CELL, split(0.05)), (ZERO, split()))
    svg = figure.svg()
    shown = [text for text in texts_of(svg) if text.startswith(("backend", "rank"))]
    assert shown == ["backend=ddp", "rank 0", "rank 1", "backend=zero2", "rank 0", "rank 1"]
    assert {name for name, _ in PARTS.values()} <= set(texts_of(svg))
    bars = drawn_bars(svg)
    first, second = bars[: len(PARTS)], bars[len(PARTS) : 2 * len(PARTS)]
    assert [bar.colour for bar in first] == [colour for _, colour in PARTS.values()]
    assert len({bar.hatch for bar in first}) == len(PARTS)
    assert first[-1].right == pytest.approx(second[-1].right), "ranks end a step together"
    assert (second[1].right - second[1].left) == pytest.approx(2 * (first[1].right - first[1].left), rel=0.01)
    assert "backend=ddp rank 1: 120 ms (waiting for data 5.00 ms, own work 100 ms" in figure.values


def test_the_sentences_stand_in_the_markdown_too():
    text = render_markdown(build_report(*run_and_records((CELL, split(0.05)), (ZERO, split()))))
    assert "## Ranks" in text
    assert "- backend=ddp: rank 1 computed 100% longer than the others: 50.0 ms a step." in text


def test_of_many_cells_only_those_with_a_sentence_are_drawn():
    cells = [(replace(CELL, seed=seed), split(0.05 if seed == 3 else 0.0)) for seed in range(MAX_STRIPS)]
    (figure,) = figures(*cells)
    assert [text for text in texts_of(figure.svg()) if text.startswith("rank")] == ["rank 0", "rank 1"]


def test_of_many_cells_that_stand_out_those_that_wait_most_are_drawn_in_their_order():
    cells = [(replace(CELL, seed=seed), split(0.05 + 0.01 * (seed % 3))) for seed in range(MAX_STRIPS)]
    (figure,) = drawings(ReportCells(summaries=summarize(*run_and_records(*cells)), axes=["seed"], max_bars=40))
    shown = [int(text.removeprefix("seed=")) for text in texts_of(figure.svg()) if text.startswith("seed=")]
    assert len(shown) == MAX_STRIPS // 2
    assert shown == sorted(shown)
    waits_most = [seed for seed in range(MAX_STRIPS) if seed % 3 == 2]
    assert set(waits_most) < set(shown)
    assert all(seed % 3 == 1 for seed in set(shown) - set(waits_most))


def test_of_many_cells_whose_ranks_wait_for_the_same_there_is_one_sentence():
    def waiting(seconds):
        value = split()
        return value | {"transfer": {"per_rank": [[seconds] * 12] * 2}}

    cells = [(replace(CELL, seed=seed), waiting(0.03 + 0.01 * seed)) for seed in range(MAX_WAITS)]
    summaries = summarize(*run_and_records(*cells, (ZERO, split(0.05))))
    sentences = rank_section(summaries, ["backend", "seed"]).sentences
    assert len(sentences) == MAX_WAITS + 1
    assert sentences[1] == "backend=ddp seed=0: the ranks wait for transfers: 33% of the step."
    more = summarize(*run_and_records(*cells, (replace(CELL, seed=99), waiting(0.24)), (ZERO, split(0.05))))
    assert rank_section(more, ["backend", "seed"]).sentences == (
        "backend=zero2 seed=0: rank 1 computed 100% longer than the others: 50.0 ms a step.",
        "In 9 cells the ranks wait for transfers: 33% to 80% of the step, most in backend=ddp seed=99.",
    )


def test_records_without_a_split_have_no_section():
    assert section((CELL, None)) is None
    assert figures((CELL, None)) == []
