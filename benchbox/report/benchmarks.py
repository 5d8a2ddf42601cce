"""Benchmarks of tests as a table on a console, as Markdown and as HTML."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchbox.analysis.baseline import slug
from benchbox.analysis.quantities import UNKNOWN, quantity, significant
from benchbox.analysis.ratios import short_name
from benchbox.report.html import render_template
from benchbox.report.markdown import escape, table_lines
from benchbox.report.rows import print_rows, say
from benchbox.store.benchmarks import read_benchmarks
from benchbox.store.files import write_text

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from benchbox.store.benchmarks import Benchmarks, MeasuredRatio

RATIO_COLUMNS = ("test", "ratio", "value", "rounds", "better", "goal")
TIMING_COLUMNS = ("test", "rounds", "fastest", "median", "slowest")
NUMBERS = ("value", "goal", "fastest", "median", "slowest")
NO_RATIOS = "No test recorded a ratio in benchmark.extra_info['ratios']: times of two runs are not compared."


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarksView:
    """Tables of benchmarks, as texts."""

    title: str
    summary: str
    ratios: tuple[tuple[str, ...], ...]
    timings: tuple[tuple[str, ...], ...]


def benchmarks_view(name: str, benchmarks: Benchmarks) -> BenchmarksView:
    """Return the texts of benchmarks. `name` is that of their file."""
    runs = len(benchmarks.started_at)
    commit = f", commit {benchmarks.commit[:10]}" if benchmarks.commit else ""
    when = f"{runs} runs of the tests" if runs > 1 else f"a run of the tests at {benchmarks.started_at[0][:16]}"
    return BenchmarksView(
        title=f"Benchmarks: {name}",
        summary=f"{len(benchmarks.ratios)} ratios of {when} on {slug(benchmarks.machine)}{commit}.",
        ratios=tuple(map(_ratio_texts, benchmarks.ratios)),
        timings=tuple(
            (
                short_name(timing.test),
                str(timing.rounds),
                *(quantity(value, "s") for value in (timing.min_s, timing.median_s, timing.max_s)),
            )
            for timing in benchmarks.timings
        ),
    )


def _ratio_texts(ratio: MeasuredRatio) -> tuple[str, ...]:
    values = ratio.values if len(ratio.values) > 1 else ratio.rounds
    middle = median(ratio.values)
    spread = f"{significant(min(values), 4)} to {significant(max(values), 4)}" if values else UNKNOWN
    goal = UNKNOWN if ratio.goal is None else f"{'<=' if ratio.better == 'lower' else '>='} {significant(ratio.goal)}"
    return short_name(ratio.test), ratio.name, significant(middle, 4), spread, ratio.better, goal


def write_benchmarks_report(path: Path, console: Console, out: Path | None = None) -> tuple[Path, Path]:
    """Print benchmarks, and write `<name>.html` and `<name>.md` beside their file or into `out`.

    Raises:
        RecordError: the file has no benchmarks.
    """
    view = benchmarks_view(path.name, read_benchmarks(path))
    if view.ratios:
        print_rows(console, RATIO_COLUMNS, view.ratios, right=NUMBERS)
    else:
        print_rows(console, TIMING_COLUMNS, view.timings, right=NUMBERS)
        say(console, f"note: {NO_RATIOS}")
    say(console, view.summary, style="bold")
    folder = path.parent if out is None else out
    html, markdown = folder / f"{path.stem}.html", folder / f"{path.stem}.md"
    write_text(html, render_benchmarks_html(view))
    write_text(markdown, render_benchmarks_markdown(view))
    return html, markdown


def render_benchmarks_html(view: BenchmarksView) -> str:
    """Render benchmarks as one self-contained HTML file."""
    tables = [("ratios", "Ratios", RATIO_COLUMNS, view.ratios), ("times", "Times of a round", TIMING_COLUMNS, view.timings)]
    return render_template(
        "benchmarks.html.j2",
        view=view,
        numbers=NUMBERS,
        tables=[table for table in tables if table[3]],
        note=None if view.ratios else NO_RATIOS,
    )


def render_benchmarks_markdown(view: BenchmarksView) -> str:
    """Render benchmarks as GitHub-flavoured Markdown. Input text is escaped."""
    lines = [f"# {escape(view.title)}", "", escape(view.summary)]
    for title, columns, rows in (("Ratios", RATIO_COLUMNS, view.ratios), ("Times of a round", TIMING_COLUMNS, view.timings)):
        if rows:
            lines += ["", f"## {title}", "", *table_lines(columns, rows, right=NUMBERS)]
    return "\n".join([*lines, *([] if view.ratios else ["", escape(NO_RATIOS)])]) + "\n"
