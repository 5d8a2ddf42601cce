"""Writing a site: its index, and a page for each matrix. All of it is static, without scripts and network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from benchbox.analysis.inference import RELEVANT
from benchbox.analysis.quantities import UNKNOWN, quantity
from benchbox.report.html import render_template
from benchbox.report.site.chart import trend_drawing
from benchbox.report.site.sources import read_sources
from benchbox.report.site.view import (
    CHANGE_COLUMNS,
    METRICS,
    POINT_COLUMNS,
    build_pages,
    change_texts,
    method_text,
    point_texts,
)
from benchbox.store.files import write_text
from benchbox.store.revisions import commit_order

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from benchbox.analysis.trends import Trend
    from benchbox.registry.metrics import Metric
    from benchbox.report.site.sources import SiteSources
    from benchbox.report.site.view import MatrixPage

NUMBERS = ("value", "launches", "low", "high", "after / before")


def write_site(
    names: Sequence[str],
    out: Path,
    *,
    history: bool = False,
    metrics: Sequence[str] = METRICS,
    relevant: float = RELEVANT,
    title: str = "Measurements over time",
) -> tuple[list[Path], SiteSources]:
    """Write `index.html` and a page for each matrix into `out`, and return their paths and what was read.

    Raises:
        RecordError: a source cannot be read.
        ConfigurationError: there is no such metric.
    """
    sources = read_sources(names, out, history=history)
    pages = build_pages(sources, commit_order(), metrics=metrics, relevant=relevant)
    shared = {"method": method_text(relevant), "columns": CHANGE_COLUMNS, "numbers": NUMBERS}
    paths = []
    for page in pages:
        html = render_template("site_matrix.html.j2", page=page, title=title, **_matrix_content(page), **shared)
        paths.append(out / page.file)
        write_text(paths[-1], html)
    changes = [(page, trend, change, change_texts(trend, change)) for page in pages for trend, change in page.changes]
    index = render_template(
        "site_index.html.j2", pages=pages, changes=changes, left_out=sources.left_out, title=title, **shared
    )
    paths.insert(0, out / "index.html")
    write_text(paths[0], index)
    return paths, sources


def _matrix_content(page: MatrixPage) -> dict[str, Any]:
    """Return what the page of a matrix shows of each cell: charts, tables and sentences."""
    reports = {run.figures.name: run.report for run in page.runs}
    cells, single = [], []
    for cell_number, (cell, trends) in enumerate(page.cells.items()):
        if all(len(trend.points) == 1 for trend in trends):
            single.append(_single_row(cell, trends, page.metrics))
            continue
        views = [_trend_view(trend, f"c{cell_number}-{number}") for number, trend in enumerate(trends)]
        cells.append({"key": f"cell-{cell_number}", "label": cell, "trends": views})
    changes = [(change_texts(trend, change), change) for trend, change in page.changes]
    return {"cells": cells, "reports": reports, "changes": changes, "point_columns": POINT_COLUMNS, "single": single}


def _single_row(cell: str, trends: Sequence[Trend], metrics: Sequence[Metric]) -> tuple[str, ...]:
    """Return a cell that was measured in one run as texts: its label, the run, its commit and date, and every metric."""
    run, commit, date, *_ = point_texts(trends[0].points[0], trends[0].metric)
    values = {trend.metric.name: point_texts(trend.points[0], trend.metric)[3] for trend in trends}
    return cell, run, commit, date, *(values.get(metric.name, UNKNOWN) for metric in metrics)


def _trend_view(trend: Trend, key: str) -> dict[str, Any]:
    """Return the chart of a trend if there is something to see in it, and its points as rows."""
    is_constant = len({point.value for point in trend.points}) == 1
    drawn = bool(trend.changes) or (len(trend.points) > 2 and not is_constant)  # two values are read in the table
    last = quantity(trend.points[-1].value, trend.metric.unit, digits=4)
    runs = len(trend.points)
    return {
        "key": key,
        "metric": trend.metric,
        "svg": Markup(trend_drawing(trend, key).svg()) if drawn else None,  # noqa: S704  (matplotlib escapes texts)
        "sentence": f"{last} in {'the only run' if runs == 1 else f'all {runs} runs'}." if is_constant else f"{last} now.",
        "points": [(point_texts(point, trend.metric), point) for point in trend.points],
    }
