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


@pytest.mark.parametrize(("severity", "level", "column"), [("error", "error", "BXP201 error"), ("info", "ok", "1 note")])
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
