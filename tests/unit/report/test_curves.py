"""Curves show the course of every cell where there is one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchbox.analysis.summary import summarize
from benchbox.report.curves import MAX_CURVES, MIN_STEPS, draw_curves
from tests.support.example_run import CELL, example_record, example_run

FSDP, ZERO = replace(CELL, backend="fsdp1_full"), replace(CELL, backend="zero2")


def charts(courses):
    """Draw the launches of cells whose gradient norms are given."""
    records = []
    for cell, grad_norm in courses:
        record = example_record(cell, 1)
        records.append({**record, "grad_norm": grad_norm, "loss": [2.0] * len(grad_norm)})
    cells = {record["cell_id"]: record["cell"] for record in records}
    summaries = summarize(replace(example_run([CELL]), cells=cells), records)
    return {chart.key: chart for chart in draw_curves(summaries, ["backend"])}


def points(curve):
    return [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", curve.path)]


def test_heights_are_proportional_to_values_and_steps_are_evenly_spaced():
    norms = [float(value) for value in range(MIN_STEPS)]
    chart = charts([(FSDP, norms), (ZERO, [3.0] * MIN_STEPS)])["grad_norm"]
    rising, flat = chart.curves
    heights = [chart.bottom - y for _, y in points(rising)]
    assert heights == pytest.approx([value / norms[-1] * heights[-1] for value in norms], abs=0.06)
    assert [chart.bottom - y for _, y in points(flat)] == pytest.approx([heights[3]] * MIN_STEPS, abs=0.06)
    gaps = [after - before for (before, _), (after, _) in zip(points(rising), points(rising)[1:], strict=False)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps), abs=0.11)
    assert points(rising)[-1][0] < chart.width


def test_a_step_without_a_value_interrupts_its_curve():
    norms = [1.0] * MIN_STEPS
    norms[5] = None
    (curve,) = charts([(FSDP, norms)])["grad_norm"].curves
    assert curve.path.count("M") == 2
    assert len(points(curve)) == MIN_STEPS - 1


def test_cells_are_named_by_what_varies_and_have_different_colours():
    chart = charts([(FSDP, [1.0] * MIN_STEPS), (ZERO, [2.0] * MIN_STEPS)])["loss"]
    assert [(entry.text, entry.colour) for entry in chart.legend] == [("backend=fsdp1_full", "s0"), ("backend=zero2", "s1")]


def test_few_steps_or_more_cells_than_colours_have_no_curves():
    assert charts([(FSDP, [1.0] * (MIN_STEPS - 1))]) == {}
    cells = [replace(CELL, seed=seed) for seed in range(MAX_CURVES + 1)]
    assert charts([(cell, [1.0] * MIN_STEPS) for cell in cells]) == {}
    assert set(charts([(cell, [1.0] * MIN_STEPS) for cell in cells[1:]])) == {"loss", "grad_norm"}
