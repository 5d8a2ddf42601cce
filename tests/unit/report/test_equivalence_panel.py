"""The equivalence panel of a report: a row for every cell, charts where there are few groups, and few rows on a terminal."""

from __future__ import annotations

import re
from dataclasses import replace

from benchbox.analysis.summary import summarize
from benchbox.report.equivalence import MAX_CHARTED_GROUPS, MAX_TERMINAL_ROWS, equivalence_panel
from tests.support.example_run import CELL, example_record, example_run

STEPS = 12
SINGLE = replace(CELL, backend="single", world_size=1, batch=4)


def panel(*cells_and_losses, axes=("backend",)):
    """Return the panel of cells with the given losses in every step."""
    records = [example_record(cell) | {"loss": losses, "grad_norm": [1.0] * len(losses)} for cell, losses in cells_and_losses]
    cells = {record["cell_id"]: record["cell"] for record in records}
    run = replace(example_run([CELL]), cells=cells, reference={"backend": "single"})
    return equivalence_panel(summarize(run, records), axes)


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


def test_charts_show_differences_on_a_logarithmic_scale_below_the_tolerance():
    base = [2.0] * STEPS
    charts = panel((SINGLE, base), (CELL, [2.0 + 0.02 * 0.1 ** (step % 3) for step in range(STEPS)])).charts
    loss, norm = charts
    assert [chart.key for chart in charts] == ["equivalence-0-loss", "equivalence-0-grad_norm"]
    curve, tolerance = loss.curves
    assert (curve.name, tolerance.name) == ("backend=ddp world_size=2 batch=2", "tolerance")
    heights = [loss.bottom - float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", curve.path)]
    assert heights[0] - heights[1] - (heights[1] - heights[2]) < 0.2, "every power of ten has the same height"
    assert heights[0] > heights[1] > heights[2] > 0
    (no_difference, _) = norm.curves
    assert {float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", no_difference.path)} == {norm.bottom}


def test_few_steps_and_many_groups_have_no_charts():
    assert panel((SINGLE, [2.0] * 5), (CELL, [2.0] * 5)).charts == ()
    seeds = [replace(cell, seed=seed) for seed in range(MAX_CHARTED_GROUPS + 1) for cell in (SINGLE, CELL)]
    report = panel(*((cell, [2.0] * STEPS) for cell in seeds), axes=("backend", "seed"))
    assert report.charts == ()
    assert len(report.rows) == len(seeds)


def test_a_terminal_shows_only_diverged_cells_of_a_large_run():
    seeds = [replace(cell, seed=seed) for seed in range(MAX_TERMINAL_ROWS) for cell in (SINGLE, CELL)]
    losses = {cell: [2.0] * STEPS for cell in seeds} | {seeds[-1]: [3.0] * STEPS}
    report = panel(*losses.items(), axes=("backend", "seed"))
    assert [(row.cell, row.verdict) for row in report.brief_rows] == [(f"backend=ddp seed={MAX_TERMINAL_ROWS - 1}", "diverged")]


def test_a_run_without_equal_trainings_has_no_panel():
    assert panel((SINGLE, [2.0] * STEPS), (replace(CELL, seed=1), [2.0] * STEPS)) is None
