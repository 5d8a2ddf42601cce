"""Writing the reports of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.baseline import slug
from benchbox.report.html import render_html
from benchbox.report.markdown import render_markdown, render_summary
from benchbox.report.view import build_report
from benchbox.store.files import write_text
from benchbox.store.links import read_links
from benchbox.store.peaks import read_peaks
from benchbox.store.predictions import read_predictions, read_unpredicted
from benchbox.store.run import RunStore
from benchbox.store.table import LaunchTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.report.view import Report


FIGURES_FOLDER = "figures"  # beside report.md, which shows them


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPaths:
    """Paths of the files written."""

    html: Path
    markdown: Path
    csv: Path
    parquet: Path
    records: Path | None  # of a published run


def write_reports(
    run_path: Path, out: Path | None = None, *, pack: bool = False, memory_limit: int | None = None
) -> ReportPaths:
    """Write `report.html`, `report.md` with its figures, `table.csv` and `table.parquet` into the run directory, or into `out`.

    With `pack`, also write `run.json` and `records.parquet`, so that the folder is a run directory without `cells/`. The
    answer must fit in `memory_limit` bytes of a rank.

    Raises:
        RecordError: the run or one of its records cannot be read, or `out` has records of its own.
    """
    store, folder = RunStore(run_path), run_path if out is None else out
    with LaunchTable() as table:
        report = read_report(store, _added_to(table, store.records()), memory_limit)
        folder.mkdir(parents=True, exist_ok=True)
        packed = store.publish(folder) if pack else None
        html, markdown = folder / "report.html", folder / "report.md"
        write_text(html, render_html(report))
        write_text(markdown, render_markdown(report))
        for drawing in report.overview_figures:
            drawing.save_svg(folder / FIGURES_FOLDER)
        csv, parquet = table.write(folder)
    return ReportPaths(html=html, markdown=markdown, csv=csv, parquet=parquet, records=packed)


def write_figures(run_path: Path, folder: Path, memory_limit: int | None = None) -> list[Path]:
    """Write the figures of a run's report as SVG, PDF and PNG files, for papers and slides."""
    store = RunStore(run_path)
    report = read_report(store, store.records(), memory_limit)
    return [path for drawing in report.figures for path in drawing.save(folder)]


def summary_text(run_path: Path, memory_limit: int | None = None) -> str:
    """Return a page of Markdown on a run, for the summary of a CI job."""
    store = RunStore(run_path)
    return render_summary(read_report(store, store.records(), memory_limit))


def read_report(store: RunStore, records: Iterable[LaunchRecord], memory_limit: int | None = None) -> Report:
    """Return the report of the records of a run, with what the run directory and this machine's cache have beside them."""
    return build_report(
        store.run(),
        records,
        chain_head=store.chain.head(),
        predictions=read_predictions(store.path),
        unpredicted=read_unpredicted(store.path),
        memory_limit=memory_limit,
        peaks=lambda machine: read_peaks(slug(machine)),
        links=lambda machine: read_links(slug(machine)),
    )


def _added_to(table: LaunchTable, records: Iterable[LaunchRecord]) -> Iterator[LaunchRecord]:
    """Yield the records, each after it was added to the table."""
    for record in records:
        table.add(record)
        yield record
