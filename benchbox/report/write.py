"""Writing the reports of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.report.html import render_html
from benchbox.report.markdown import render_markdown
from benchbox.report.view import build_report
from benchbox.store.files import write_text
from benchbox.store.predictions import read_predictions, read_unpredicted
from benchbox.store.run import RunStore
from benchbox.store.table import write_tables

if TYPE_CHECKING:
    from pathlib import Path


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
    """Write `report.html`, `report.md`, `table.csv` and `table.parquet` into the run directory, or into `out`.

    With `pack`, also write `run.json` and `records.parquet`, so that the folder is a run directory without `cells/`. The
    answer must fit in `memory_limit` bytes of a rank.

    Raises:
        RecordError: the run or one of its records cannot be read, or `out` has records of its own.
    """
    store = RunStore(run_path)
    records = list(store.records())
    report = build_report(
        store.run(),
        records,
        chain_head=store.chain.head(),
        predictions=read_predictions(run_path),
        unpredicted=read_unpredicted(run_path),
        memory_limit=memory_limit,
    )
    folder = run_path if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    packed = store.publish(folder) if pack else None
    html, markdown = folder / "report.html", folder / "report.md"
    write_text(html, render_html(report))
    write_text(markdown, render_markdown(report))
    csv, parquet = write_tables(records, folder)
    return ReportPaths(html=html, markdown=markdown, csv=csv, parquet=parquet, records=packed)
