"""The content of a site: texts of points and changes, labels of cells, charts, and measurements that were published twice."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.analysis.baseline import make_baseline
from benchbox.analysis.figures import figures_of_baseline, figures_of_run
from benchbox.analysis.summary import summarize
from benchbox.report.figures.drawing import PRINT
from benchbox.report.site.chart import trend_drawing
from benchbox.report.site.sources import SiteRun, SiteSources
from benchbox.report.site.view import MatrixPage, build_pages, change_texts, point_texts
from benchbox.store.noise import Noise, write_noise
from tests.support.example_run import CELL, MEASURE, example_run, steady_records

if TYPE_CHECKING:
    from benchbox.spec.cell import Cell

ZERO = replace(CELL, backend="zero2")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No noise of this machine was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run_and_records(*cells: Cell, step_s: float = 0.2, day: int = 1, commit: str | None = "a" * 40, **environment: Any):
    measure = asdict(MEASURE) | {"launches": 5}
    records = [r for cell in cells for r in steady_records(cell, step_s=step_s, started=f"2026-01-{day:02}")]
    git = {} if commit is None else {"git": {"commit": commit, "dirty": False}}
    for record in records:
        record["environment"] = record["environment"] | git | environment
    return example_run(list(cells), measure=measure), records


def site_run(name: str, *cells: Cell, **options: Any) -> SiteRun:
    return SiteRun(figures=figures_of_run(name, *run_and_records(*(cells or (CELL,)), **options)), report=None, published_at="")


def page_of(*runs: SiteRun, metrics: tuple[str, ...] = ("step_time_s",), relevant: float = 0.02) -> MatrixPage:
    order = {letter * 40: number for number, letter in enumerate("abcdef")}
    (page,) = build_pages(SiteSources(runs=runs, left_out=()), order, metrics=metrics, relevant=relevant)
    return page


def test_a_change_has_both_values_with_their_commits_the_interval_and_what_else_differs():
    page = page_of(
        site_run("old"),
        site_run("new", step_s=0.3, day=2, commit="b" * 40, torch="2.14.0"),
        metrics=("step_time_s", "peak_allocated_bytes"),
    )
    ((trend, change),) = page.changes
    cell, metric, before, after, ratio, verdict, differences = change_texts(trend, change)
    assert (cell, metric, verdict) == ("backend=ddp", "step_time_s", "worse")
    assert (before, after) == ("200.2 ms at aaaaaaaa", "300.3 ms at bbbbbbbb")
    assert ratio == f"1.500x ({change.low:.3f}x to {change.high:.3f}x)"
    assert differences == "torch 2.14.0 against 2.13.0"
    assert page.summary.endswith("; 2 of 2 trends have two runs or more. Changes: 1 for the worse.")
    assert page.dates == "2026-01-01 to 2026-01-02"


@pytest.mark.parametrize(
    ("step_s", "commit", "summary"),
    [
        (0.1, "b" * 40, "1 for the better"),
        (0.3, "a" * 40, "1 drift of the machine within a commit"),
        (0.2, "b" * 40, "none"),
    ],
)
def test_changes_are_counted_by_their_direction_and_within_a_commit_they_are_drift(step_s, commit, summary):
    page = page_of(site_run("old"), site_run("new", step_s=step_s, day=2, commit=commit))
    assert page.summary.startswith("2 runs and baselines of 1 cells on example-cpu-2-cores; 1 of 1 trends ")
    assert page.summary.endswith(f"Changes: {summary}.")
    assert [change_texts(*change)[-1] for change in page.changes] == ([] if summary == "none" else ["nothing"])


def test_what_is_not_relevant_or_within_the_noise_measured_on_the_machine_is_no_change():
    runs = site_run("old"), site_run("new", step_s=0.3, day=2, commit="b" * 40)
    assert len(page_of(*runs).changes) == 1
    assert page_of(*runs, relevant=0.6).changes == []
    noise = Noise(sigma=0.3, launches=10, ratio=1.0, cell="backend=ddp", measured_at="2026-01-01", benchbox_version="1")
    write_noise("example-cpu-2-cores", "example", noise)
    assert page_of(*runs).changes == []


@pytest.mark.parametrize(
    ("step_s", "commit", "colour"),
    [(0.3, "b" * 40, PRINT.bad), (0.1, "b" * 40, PRINT.ok), (0.3, "a" * 40, PRINT.soft)],
    ids=["worse", "better", "drift"],
)
def test_a_chart_has_values_in_ms_and_a_line_before_the_run_that_changed_in_the_colour_of_its_verdict(step_s, commit, colour):
    (trend,) = page_of(site_run("old"), site_run("new", step_s=step_s, day=2, commit=commit)).trends
    (panel,) = trend_drawing(trend, "k").draw(PRINT).axes
    values, change = panel.lines
    assert panel.get_ylabel() == "ms"
    assert values.get_xdata() == pytest.approx([0, 1])
    assert values.get_ydata() == pytest.approx([200.2, 1001 * step_s])
    assert change.get_xdata() == pytest.approx([0.5, 0.5])
    assert change.get_color() == colour


def test_what_a_run_does_not_know_is_a_dash_and_uncommitted_changes_have_an_asterisk():
    known, unknown = site_run("known"), site_run("unknown", commit=None, torch=None)
    git = {"git": {"commit": "c" * 40, "dirty": True}}
    edited = replace(known.figures, environments={2: known.figures.environment | git})
    texts = []
    for run in (
        known,
        replace(known, figures=edited),
        replace(unknown, figures=replace(unknown.figures, started_at=frozenset())),
    ):
        (trend,) = page_of(run).trends
        texts.append(point_texts(trend.points[0], trend.metric))
    assert texts[0] == ("known", "aaaaaaaa", "2026-01-01", "200.2 ms", "5", "200.0 ms", "200.4 ms", "2.13.0")
    assert texts[1][1] == "cccccccc*"
    assert (texts[2][1], texts[2][2], texts[2][-1]) == ("-", "-", "-")
    assert page_of(known).summary.startswith("1 run of 1 cells")
    assert page_of(known).dates == "2026-01-01"


def test_one_measurement_that_was_published_twice_is_one_point_with_its_launches():
    run, records = run_and_records(CELL)
    baseline = figures_of_baseline("baseline", make_baseline(run, summarize(run, records), "example"))
    older = replace(baseline, cells={CELL.cell_id: replace(baseline.cells[CELL.cell_id], by_launch={})})
    measured = site_run("run")
    reported = replace(measured, figures=replace(measured.figures, name="reported"), report="report.html")
    for runs in ((older, measured.figures), (measured.figures, older)):
        (trend,) = page_of(*(SiteRun(figures=figures, report=None, published_at="") for figures in runs)).trends
        assert [(point.run, len(point.launches)) for point in trend.points] == [("run", 5)]
    for order in ((measured, reported), (reported, measured)):
        assert page_of(*order).measurements == {"reported"}
    assert page_of(measured, site_run("again", day=2, step_s=0.2001)).measurements == {"run", "again"}


@pytest.mark.parametrize(("fastest_first", "launches"), [(5, 4), (1, 0)])
def test_the_launch_that_searched_for_a_batch_is_no_part_of_a_trend(fastest_first, launches):
    """It favours whatever chance made fast. Where there is no other, the value is shown and nothing is tested."""
    run, records = run_and_records(CELL)
    walk = {"cells": [CELL.cell_id], "fastest": CELL.cell_id, "at_most": None, "predicted_batch": None}
    searched = steady_records(CELL, step_s=0.1)[:1]
    figures = figures_of_run("walk", replace(run, walks=[walk]), [*searched, *records[1:fastest_first]])
    (trend,) = page_of(SiteRun(figures=figures, report=None, published_at="")).trends
    (point,) = trend.points
    assert len(point.launches) == launches
    assert min(point.launches, default=1.0) > 0.15


def test_cells_that_differ_only_between_runs_are_told_apart_by_their_ids():
    page = page_of(site_run("old", CELL, ZERO), site_run("new", replace(CELL, seed=1), day=2))
    assert list(page.cells) == [
        f"backend=ddp ({replace(CELL, seed=1).cell_id})",
        f"backend=ddp ({CELL.cell_id})",
        "backend=zero2",
    ]


def test_matrices_whose_names_make_one_file_name_have_a_page_each_beside_the_index():
    runs = tuple(site_run(name) for name in ("a b", "a-b", "index"))
    named = (replace(run, figures=replace(run.figures, matrix=run.figures.name)) for run in runs)
    pages = build_pages(SiteSources(runs=tuple(named), left_out=()), {}, metrics=("step_time_s",), relevant=0.02)
    files = {page.matrix: page.file for page in pages}
    assert files == {"a b": "a-b.html", "a-b": "a-b-2.html", "index": "index-2.html"}


def test_a_matrix_that_several_machines_have_run_has_a_page_for_each():
    sources = SiteSources(runs=(site_run("a"), site_run("b", machine="Other")), left_out=())
    pages = build_pages(sources, {}, metrics=("step_time_s",), relevant=0.02)
    assert [page.file for page in pages] == ["example-example-cpu-2-cores.html", "example-other.html"]
    assert page_of(site_run("a")).file == "example.html"
