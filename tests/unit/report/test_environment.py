"""Environment differences of a run and of a comparison: what differs, in which launches and cells."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from benchbox.report.comparison.html import render_html as render_comparison
from benchbox.report.comparison.view import NO_DIFFERENCES
from benchbox.report.environment import MAX_VALUES
from benchbox.report.html import render_html
from benchbox.report.markdown import render_markdown
from benchbox.report.view import build_report
from tests.support.example_run import CELL, example_record, example_run
from tests.unit.report.test_comparison import COMPARISON

CELLS = (CELL, replace(CELL, backend="zero2"))


def report_of(*torch_versions):
    """Return a report of two launches of each cell, with these versions of torch."""
    records = [copy.deepcopy(example_record(cell, launch=launch)) for cell in CELLS for launch in (1, 2)]
    for record, version in zip(records, torch_versions, strict=True):
        record["environment"]["torch"] = version
    cells = {record["cell_id"]: record["cell"] for record in records}
    return build_report(replace(example_run([CELL]), cells=cells), records)


def test_cells_that_ran_in_another_environment_are_listed_beside_the_value():
    differences = report_of("2.13", "2.13", "2.14", "2.14").differences
    assert differences.rows == (
        ("torch", "2.13", "2", "backend=ddp (1 of 2 cells)"),
        ("torch", "2.14", "2", "backend=zero2 (1 of 2 cells)"),
    )
    assert differences.mixed == ()
    assert "4 launches differ in 1 of " in differences.summary


def test_launches_of_one_cell_that_differ_are_a_warning():
    report = report_of("2.13", "2.14", "2.13", "2.13")
    assert report.differences.mixed == ("torch",)
    assert "Launches of one cell differ in torch" in render_html(report)
    assert "**Launches of one cell differ in torch.**" in render_markdown(report)


def test_equal_environments_are_said_to_be_equal():
    differences = report_of(*["2.13"] * 4).differences
    assert differences.summary.startswith("All 4 launches had the same environment")
    assert differences.rows == ()


@pytest.mark.parametrize(
    ("differences", "text"), [(COMPARISON.differences, "<li>torch 2.12 against 2.13</li>"), ((), NO_DIFFERENCES)]
)
def test_the_page_of_a_comparison_has_the_differences_of_its_sides(differences, text):
    page = render_comparison(replace(COMPARISON, differences=differences))
    assert text in page[page.index('id="environment-differences"') :]


def test_of_a_key_with_many_values_the_last_are_counted():
    """A scheduler sets such a variable anew for every launch."""
    cells = [replace(CELL, seed=seed) for seed in range(MAX_VALUES + 2)]
    records = [copy.deepcopy(example_record(cell)) for cell in cells]
    for number, record in enumerate(records):
        record["environment"]["job"] = f"job {number}"
    (*_, last, others) = build_report(example_run(cells), records).differences.rows
    assert last == ("job", f"job {MAX_VALUES - 1}", "1", f"seed={MAX_VALUES - 1} (1 of {len(cells)} cells)")
    seeds = f"seed in [{MAX_VALUES}, {MAX_VALUES + 1}]"
    assert others == ("job", "2 more values", "2", f"{seeds} (2 of {len(cells)} cells)")
