from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.report.html import render_html
from benchbox.report.view import build_report
from tests.support.example_run import CELL, example_record, example_run


def report_of(recipes=("fp32", "bf16_pure"), edq=None):
    cells = [replace(CELL, backend=backend, recipe=recipe) for recipe in recipes for backend in ("ddp", "zero2")]
    records = []
    for cell in cells:
        record = example_record(cell)
        record["precision"]["numbers"]["edq"] = (edq or {}).get((cell.recipe, cell.backend), 1.0)
        records.append(record)
    return build_report(example_run(cells), records)


def test_recipes_are_rows_conditions_are_columns_and_lost_updates_stand_out():
    report = report_of(edq={("bf16_pure", "ddp"): 0.298, ("bf16_pure", "zero2"): 0.7})
    assert report.precision.conditions == ("backend=ddp", "backend=zero2")
    levels = {recipe: [(cell.edq, cell.level) for cell in cells] for recipe, cells in report.precision.rows}
    assert levels == {
        "fp32": [("1.000", "ok"), ("1.000", "ok")],
        "bf16_pure": [("0.298", "error"), ("0.700", "warning")],
    }
    page = render_html(report)
    assert "What each recipe does to the weights" in page
    assert '<span class="edq" data-status="error">0.298</span>' in page


def test_conditions_are_distinguished_by_every_axis_that_adds_information():
    """Here size and backend; the number of ranks follows from the backend."""
    conditions = [("tiny", "single", 1), ("tiny", "ddp", 2), ("small", "ddp", 2)]
    cells = [
        replace(CELL, size=size, backend=backend, world_size=ranks, recipe=recipe)
        for recipe in ("fp32", "bf16_pure")
        for size, backend, ranks in conditions
    ]
    grid = build_report(example_run(cells), [example_record(cell) for cell in cells]).precision
    assert grid.conditions == ("size=tiny backend=single", "size=tiny backend=ddp", "size=small backend=ddp")
    assert all(cell.level == "ok" for _, row in grid.rows for cell in row)


def test_a_run_that_compares_no_recipes_has_no_grid():
    report = report_of(recipes=("fp32",))
    assert report.precision is None
    assert "What each recipe does" not in render_html(report)


@pytest.mark.parametrize(
    ("severity", "level", "column"),
    [
        ("error", "error", "BXP201 error"),
        ("warning", "warning", "BXP201 warning"),
        ("unknown", "missing", "BXP201 unknown"),  # something could not be read: it may be wrong
        ("info", "ok", "1 note"),
    ],
)
def test_a_cell_has_the_colour_of_its_worst_finding_and_the_table_counts_its_notes(severity, level, column):
    """Every update arrives in the weights, and the second moment stalls all the same."""
    cells = [replace(CELL, recipe=recipe) for recipe in ("fp32", "bf16_kahan")]
    records = [example_record(cell) for cell in cells]
    finding = {
        "code": "BXP201",
        "severity": severity,
        "title": "v stalls",
        "where": "",
        "evidence": {},
        "repair": "",
        "fields": [],
    }
    template = next(iter(records[0]["precision"]["findings"]), {})
    records[1]["precision"]["findings"] = [template | finding]
    report = build_report(example_run(cells), records)
    ((sound,), (wrong,)) = (row for _, row in report.precision.rows)
    assert (sound.level, wrong.level, wrong.edq) == ("ok", level, "1.000")
    assert "BXP201" in wrong.details
    position = [column.name for column in report.table.columns].index("findings")
    assert [row[position].text for row in report.table.rows] == ["none", column]


def test_what_was_not_measured_and_what_is_no_cell_have_no_colour_of_a_verdict():
    """One recipe has no cell under one condition, one cell has not run, and one was not audited."""
    ddp, zero = (replace(CELL, backend=backend, recipe="fp32") for backend in ("ddp", "zero2"))
    unaudited = replace(CELL, recipe="bf16_pure")
    records = [example_record(ddp), example_record(unaudited) | {"precision": None}]
    grid = build_report(example_run([ddp, zero, unaudited]), records).precision
    rows = dict(grid.rows)
    sound, missing = rows["fp32"]
    assert (sound.level, missing.edq, missing.level, missing.details) == ("ok", "-", "missing", ("missing",))
    unknown, absent = rows["bf16_pure"]
    assert (unknown.edq, unknown.level, unknown.details) == ("-", "missing", ("loss 0.40000",))
    assert (absent.edq, absent.level, absent.details) == ("-", "missing", ("no such cell",))


def test_a_batch_that_one_recipe_was_not_launched_with_is_not_called_unsupported():
    """A walk with one recipe tries other batches than one with another."""
    cells = [replace(CELL, recipe=recipe, batch=batch) for recipe, batch in (("fp32", 2), ("bf16_pure", 2), ("bf16_pure", 4))]
    grid = build_report(example_run(cells), [example_record(cell) for cell in cells]).precision
    assert dict(grid.rows)["fp32"][1].details == ("no such cell",)


def test_a_cell_lists_what_its_updates_and_moments_lost():
    records = [example_record(replace(CELL, recipe=recipe)) for recipe in ("fp32", "bf16_pure")]
    records[1]["precision"]["numbers"] = {"edq": 0.6, "updates_lost": 0.25, "second_moment_stalled": 0.5}
    grid = build_report(example_run([replace(CELL, recipe=recipe) for recipe in ("fp32", "bf16_pure")]), records).precision
    ((sound,), (lossy,)) = (row for _, row in grid.rows)
    assert lossy.details == (
        "25% of updates moved nothing",
        "v stalls: 50%",
        "Adam state bfloat16",
        "loss 0.40000",
    )
    assert not any("stalls" in detail for detail in sound.details)
