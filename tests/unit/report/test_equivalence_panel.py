"""The equivalence panel of a report: a row for every cell, charts where there are few groups, and few rows on a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.analysis.summary import summarize
from benchbox.report.equivalence import MAX_TERMINAL_ROWS, equivalence_panel
from benchbox.report.figures.cells import ReportCells
from benchbox.report.figures.differences import MAX_GROUPS, drawings
from tests.support.example_run import CELL, example_record, example_run
from tests.support.figure_svg import curve_points, texts_of

STEPS = 12
SINGLE = replace(CELL, backend="single", world_size=1, batch=4)


def summaries_of(*cells_and_losses, sources=None):
    """Return cells with the given losses in every step. `sources` has the hash of the policy of cells that have another one."""
    records = [example_record(cell) | {"loss": losses, "grad_norm": [1.0] * len(losses)} for cell, losses in cells_and_losses]
    for (cell, _), record in zip(cells_and_losses, records, strict=True):
        if cell in (sources or {}):
            record["environment"]["policy_sha256"] = sources[cell]
    cells = {record["cell_id"]: record["cell"] for record in records}
    run = replace(example_run([CELL]), cells=cells, reference={"backend": "single"})
    return summarize(run, records)


def panel(*cells_and_losses, axes=("backend",), sources=None):
    return equivalence_panel(summaries_of(*cells_and_losses, sources=sources), axes)


def figures(*cells_and_losses, axes=("backend",)):
    return list(drawings(ReportCells(summaries=summaries_of(*cells_and_losses), axes=axes, max_bars=40)))


def test_a_row_names_difference_step_tolerance_and_reference():
    base = [2.0] * STEPS
    report = panel((SINGLE, base), (CELL, [*base[:4], 2.002, *base[5:]]))
    assert report.summary == "2 cells: 1 reference, 1 equivalent."
    reference, row = report.rows
    assert (reference.verdict, reference.reference, reference.differences) == ("reference", "-", ("-", "-"))
    assert row.texts == (
        "backend=ddp",
        "equivalent",
        "0.10% in step 4 (tolerance 1.25%)",
        "nothing",
        "backend=single",
        "",
    )


def test_a_row_of_a_cell_that_is_not_compared_says_why():
    other, base = replace(CELL, backend="zero2"), [2.0] * STEPS
    rows = panel((SINGLE, base), (CELL, base), (other, base), sources={other: "1" * 64}).rows
    assert [(row.verdict, row.texts[-1]) for row in rows] == [
        ("reference", ""),
        ("equivalent", ""),
        ("not compared", "it differs in the sources of the policy"),
    ]


def test_figures_show_differences_on_a_logarithmic_scale_below_the_tolerance():
    base = [2.0] * STEPS
    loss, norm = figures((SINGLE, base), (CELL, [2.0 + 0.02 * 0.1 ** (step % 3) for step in range(STEPS)]))
    assert [figure.key for figure in (loss, norm)] == ["equivalence-0-loss", "equivalence-0-grad_norm"]
    svg = loss.svg()
    texts = texts_of(svg)
    assert texts[:2] == ["backend=ddp world_size=2 batch=2", "tolerance"]
    assert {"Difference of the loss by step", "1e-2", "1e-3"} <= set(texts)
    (points,) = curve_points(svg, "s0")
    heights = [-y for _, y in points]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.1), "powers of ten have the same height"
    assert heights[0] > heights[1] > heights[2]
    (limit,) = curve_points(svg, "bad")
    assert limit[-1][1] < points[-3][1], "the tolerance of the last steps is above a difference of 1%"
    assert "stroke-dasharray" in svg
    (flat,) = curve_points(norm.svg(), "s0")
    lowest = max(y for part in curve_points(norm.svg(), "bad") for _, y in part)
    assert {y for _, y in flat} == {max(y for _, y in flat)}, "no difference lies on the axis"
    assert flat[0][1] > lowest


def test_few_steps_and_many_groups_have_no_figures():
    assert figures((SINGLE, [2.0] * 5), (CELL, [2.0] * 5)) == []
    seeds = [replace(cell, seed=seed) for seed in range(MAX_GROUPS + 1) for cell in (SINGLE, CELL)]
    losses = [(cell, [2.0] * STEPS) for cell in seeds]
    assert figures(*losses, axes=("backend", "seed")) == []
    assert len(figures(*losses[:-2], axes=("backend", "seed"))) == 2 * MAX_GROUPS
    assert len(panel(*losses, axes=("backend", "seed")).rows) == len(seeds)


def test_a_terminal_shows_only_diverged_cells_of_a_large_run():
    seeds = [replace(cell, seed=seed) for seed in range(MAX_TERMINAL_ROWS) for cell in (SINGLE, CELL)]
    losses = {cell: [2.0] * STEPS for cell in seeds} | {seeds[-1]: [3.0] * STEPS}
    report = panel(*losses.items(), axes=("backend", "seed"))
    assert [(row.cell, row.verdict) for row in report.brief_rows] == [(f"backend=ddp seed={MAX_TERMINAL_ROWS - 1}", "diverged")]


def test_a_run_without_equal_trainings_has_no_panel():
    assert panel((SINGLE, [2.0] * STEPS), (replace(CELL, seed=1), [2.0] * STEPS)) is None


def test_a_quantity_without_a_number_on_both_sides_has_no_difference():
    unknown = [None] * STEPS
    _, row = panel((SINGLE, unknown), (CELL, unknown)).rows
    assert (row.verdict, row.differences) == ("equivalent", ("-", "nothing"))
