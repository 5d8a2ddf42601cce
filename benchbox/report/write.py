"""Writing the reports of a run beside its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.report.html import render_html
from benchbox.report.markdown import render_markdown
from benchbox.report.view import build
from benchbox.store.files import write_text
from benchbox.store.run import RunStore
from benchbox.store.table import write_tables

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPaths:
    """Where everything was written."""

    html: Path
    markdown: Path
    csv: Path
    parquet: Path


def write_reports(run_path: Path, out: Path | None = None) -> ReportPaths:
    """Write `report.html`, `report.md`, `table.csv` and `table.parquet` into the run directory, or into `out`.

    Raises:
        RecordError: the run or one of its records cannot be read.
    """
    store = RunStore(run_path)
    records = list(store.records())
    report = build(store.run(), records)
    folder = run_path if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    html, markdown = folder / "report.html", folder / "report.md"
    write_text(html, render_html(report))
    write_text(markdown, render_markdown(report))
    csv, parquet = write_tables(records, folder)
    return ReportPaths(html=html, markdown=markdown, csv=csv, parquet=parquet)
