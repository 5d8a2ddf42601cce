"""Size of a report and time to render it, from 200 to 10,000 cells."""

from __future__ import annotations

import time

import pytest

from benchbox.report.html import render_html
from benchbox.report.view import build_report
from tests.support.large_runs import published_cells
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.perf


@pytest.mark.parametrize(
    ("cells", "max_bytes"), in_tiers([(200, 10**6), (2_000, 3 * 10**6), (10_000, None)], lambda case: case[1] is not None)
)
def test_a_report_of_many_cells_stays_small(cells, max_bytes):
    run, records = published_cells(cells)
    assert len(run.cells) == cells
    start = time.process_time()
    report = build_report(run, records)
    built = time.process_time()
    page = render_html(report)
    rendered = time.process_time()
    size = len(page.encode())
    print(f"\n{cells} cells: {size:,} bytes; view {built - start:.2f} s, page {rendered - built:.2f} s of CPU time")
    assert page.count('<tr><th scope="row">') >= cells
    assert len(report.cards) == cells
    if max_bytes is not None:
        assert size <= max_bytes
