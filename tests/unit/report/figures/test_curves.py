"""Curves show the course of every cell where there is one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchbox.analysis.summary import summarize
from benchbox.report.figures.cells import ReportCells
from benchbox.report.figures.courses import MIN_STEPS, drawings
from benchbox.report.figures.curves import MAX_CURVES
from tests.support.example_run import CELL, example_record, example_run
from tests.support.figure_svg import curve_points, texts_of

FSDP, ZERO = replace(CELL, backend="fsdp1_full"), replace(CELL, backend="zero2")


def figures(courses):
    """Return the figures of cells whose gradient norms are given."""
    records = []
    for cell, grad_norm in courses:
        record = example_record(cell, 1)
        records.append({**record, "grad_norm": grad_norm, "loss": [2.0] * len(grad_norm)})
    cells = {record["cell_id"]: record["cell"] for record in records}
    summaries = summarize(replace(example_run([CELL]), cells=cells), records)
    return {drawing.key: drawing for drawing in drawings(ReportCells(summaries=summaries, axes=["backend"], max_bars=40))}


def test_heights_are_proportional_to_values_and_steps_are_evenly_spaced():
    norms = [float(value % 7 + value) for value in range(MIN_STEPS)]
    svg = figures([(FSDP, norms), (ZERO, [3.0, 4.0] * (MIN_STEPS // 2))])["grad_norm"].svg()
    (first,), (second,) = curve_points(svg, "s0"), curve_points(svg, "s1")
    assert len(first) == len(second) == MIN_STEPS
    bottom, unit = first[0][1], (first[0][1] - first[-1][1]) / norms[-1]
    assert [(bottom - y) / unit for _, y in first] == pytest.approx(norms, abs=0.02)
    assert [(bottom - y) / unit for _, y in second[:2]] == pytest.approx([3.0, 4.0], abs=0.02)
    gaps = [after[0] - before[0] for before, after in pairwise(first)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps), abs=0.03)


def test_the_axis_begins_at_zero():
    texts = texts_of(figures([(FSDP, [100.0, 101.0] * MIN_STEPS)])["grad_norm"].svg())
    assert "0" in texts[texts.index("backend=fsdp1_full") :]
    assert "Gradient norm by step" in texts


def test_negative_values_are_within_the_axes():
    values = [-2.0, -1.0] * (MIN_STEPS // 2)
    (curve,) = curve_points(figures([(FSDP, values)])["grad_norm"].svg(), "s0")
    assert len({y for _, y in curve}) == 2
    texts = texts_of(figures([(FSDP, values)])["grad_norm"].svg())
    assert any(text.startswith(("-", "\u2212")) for text in texts)


def test_a_step_without_a_value_interrupts_its_curve():
    norms = [1.0, 2.0] * (MIN_STEPS // 2)
    norms[5] = None
    parts = curve_points(figures([(FSDP, norms)])["grad_norm"].svg(), "s0")
    assert [len(part) for part in parts] == [5, MIN_STEPS - 6]


def test_cells_are_named_by_what_varies_and_differ_in_colour_line_and_marker():
    svg = figures([(FSDP, [1.0] * MIN_STEPS), (ZERO, [2.0] * MIN_STEPS)])["loss"].svg()
    names = ["backend=fsdp1_full", "backend=zero2"]
    assert [text for text in texts_of(svg) if text in names] == names
    assert all(curve_points(svg, colour) for colour in ("s0", "s1"))
    assert svg.count("stroke-dasharray") == 2, "the second curve and its key"
    markers = [part.partition('"/>')[0] for part in svg.split('<path id="')[1:]]
    first, second = (next(marker.partition('d="')[2] for marker in markers if f"var(--{c})" in marker) for c in ("s0", "s1"))
    assert first.partition('"')[0] != second.partition('"')[0], "markers tell them apart in greyscale"


def test_the_end_of_every_curve_is_in_the_description():
    svg = figures([(FSDP, [1.0] * MIN_STEPS), (ZERO, [2.0, None] * MIN_STEPS)])["grad_norm"].svg()
    assert "Warm-up steps are included. backend=fsdp1_full ends at 1. backend=zero2 ends at 2.</desc>" in svg


def test_few_steps_or_more_cells_than_colours_have_no_curves():
    assert figures([(FSDP, [1.0] * (MIN_STEPS - 1))]) == {}
    cells = [replace(CELL, seed=seed) for seed in range(MAX_CURVES + 1)]
    assert figures([(cell, [1.0] * MIN_STEPS) for cell in cells]) == {}
    assert set(figures([(cell, [1.0] * MIN_STEPS) for cell in cells[1:]])) == {"loss", "grad_norm"}
