"""What a report says, without any markup: built once from a run, rendered as HTML, Markdown or text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox import __version__
from benchbox.analysis.comparability import against_reference
from benchbox.analysis.summary import MISSING, CellSummary, label, plain, summarise, varying
from benchbox.report.columns import Column, Value, columns, table_rows
from benchbox.report.drawings import MEMORY_SOURCES, draw
from benchbox.report.headline import Headline, headline
from benchbox.report.observed import Seen, requested_and_observed
from benchbox.report.precision import PrecisionGrid, precision_grid
from benchbox.report.sections import (
    FindingView,
    Method,
    Trouble,
    environment,
    findings,
    flat_text,
    method,
    troubles,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchbox.report.charts import Chart
    from benchbox.store.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`columns` and `rows` of equal width; `notes` are read below it."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a rendered report shows."""

    title: str
    summary: str  # what was measured, in a line
    created_at: str
    version: str
    counts: tuple[tuple[str, int], ...]
    fixed: tuple[tuple[str, str], ...]  # what all cells have in common
    settings: tuple[tuple[str, str], ...]  # the same, of data and optimizer
    headline: Headline
    table: Table
    charts: tuple[Chart, ...]
    precision: PrecisionGrid | None  # of a run that compares recipes
    findings: tuple[FindingView, ...]
    audited: int  # cells with a census
    seen: tuple[Seen, ...]
    troubles: tuple[Trouble, ...]
    skipped: tuple[tuple[str, str], ...]  # cell, reason
    environment: tuple[tuple[str, str], ...]
    method: tuple[Method, ...]
    sampling: str


def build(run: Run, records: Iterable[Mapping[str, Any]]) -> Report:
    """The report of a run, from its plan and whatever records there are."""
    summaries = summarise(run, records)
    axes = varying([*run.cells.values()])
    comparisons = against_reference(summaries, run.reference, run.matrix.get("axes") or {})
    cols = columns(axes, summaries, compared=bool(run.reference))
    first: Mapping[str, Any] = next(iter(run.cells.values()), {})
    common = {field: value for field, value in first.items() if field not in axes}
    fixed = tuple(
        (field, plain(value)) for field, value in common.items() if value is not None and not isinstance(value, Mapping)
    )
    return Report(
        title=run.name,
        summary=_summary_line(run, axes),
        created_at=run.created_at.replace("T", " ").replace("+00:00", " UTC"),
        version=__version__,
        counts=_counts(run, summaries),
        fixed=fixed,
        settings=flat_text({field: value for field, value in common.items() if isinstance(value, Mapping)}),
        headline=headline(comparisons, axes),
        table=Table(columns=cols, rows=table_rows(cols, summaries, comparisons), notes=_table_notes(summaries, comparisons)),
        charts=draw(summaries, axes, tuple(run.reference)),
        precision=precision_grid(summaries, axes),
        findings=findings(summaries, axes),
        audited=sum(bool((summary.evidence or {}).get("precision")) for summary in summaries),
        seen=requested_and_observed(summaries, axes),
        troubles=tuple(troubles(summaries, axes)),
        skipped=tuple((label(entry["cell"], varying([first, entry["cell"]])), entry["reason"]) for entry in run.skipped),
        environment=environment(summaries),
        method=method(),
        sampling=_sampling(run),
    )


def _summary_line(run: Run, axes: Sequence[str]) -> str:
    varied = ", ".join(axes) if axes else "nothing"
    return f"{len(run.cells)} cells of {run.matrix_file}; {varied} varied."


def _sampling(run: Run) -> str:
    launches, warmup, steps = run.launches, run.measure["warmup_steps"], run.measure["steps"]
    return (
        f"Every cell was launched {_count(launches, 'time')}, each a fresh process group, cells interleaved. "
        f"A launch ran {_count(warmup, 'warm-up step')}, reset its peaks, and measured {_count(steps, 'step')}. "
        "The launch is the sample: a figure is the median over launches of what each found over its steps, "
        "and a range goes from the lowest launch to the highest."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _counts(run: Run, summaries: Sequence[CellSummary]) -> tuple[tuple[str, int], ...]:
    whole = sum(summary.whole for summary in summaries)
    missing = sum(summary.status == MISSING for summary in summaries)
    failed = sum(summary.status not in ("ok", MISSING) for summary in summaries)
    incomplete = len(summaries) - whole - failed - missing
    counts = {"cells": len(summaries), "ok": whole, "failed": failed, "incomplete": incomplete, "missing": missing}
    return tuple((name, count) for name, count in (counts | {"skipped": len(run.skipped)}).items() if count or name == "ok")


def _table_notes(summaries: Sequence[CellSummary], comparisons: Mapping[str, Any]) -> tuple[str, ...]:
    sources = dict.fromkeys(r["memory"]["source"] for s in summaries for r in s.ok if r["memory"])
    reasons = dict.fromkeys(r["memory"]["reason"] for s in summaries for r in s.ok if r["memory"] and r["memory"]["reason"])
    notes = [f"Memory source {source}: {MEMORY_SOURCES.get(source, 'an unknown source')}." for source in sources]
    notes += [f"Peak reserved is unknown: {reason}." for reason in reasons]
    if any(comparison.ratio is not None and comparison.apart is False for comparison in comparisons.values()):
        notes.append("A ratio marked ~ is of launches whose ranges overlap: no difference is shown.")
    return tuple(notes)
