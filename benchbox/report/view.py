"""The content of a report, without markup: built once from a run, rendered as HTML, Markdown or text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox import __version__
from benchbox.analysis.best_batches import RunComparisons, compare_run
from benchbox.analysis.certificates import certificates
from benchbox.analysis.inference import ALPHA
from benchbox.analysis.quantities import counted
from benchbox.analysis.sequential import criteria_of, looks_taken
from benchbox.analysis.step_bounds import NO_MACHINE, step_bounds
from benchbox.analysis.summary import (
    BUSY_HOST,
    HIGH_SPREAD,
    MAX_SPREAD,
    MISSING,
    ONE_LAUNCH,
    PARTIAL_STEPS,
    PARTLY_COMPILED,
    RECOMPILED,
    CellSummary,
    label,
    machine_of,
    matrix_text,
    summarize,
    varying_fields,
)
from benchbox.registry.host_load import BUSY_FORMULA
from benchbox.registry.statuses import DIVERGED
from benchbox.report.answer import AnswerBox, answer_boxes
from benchbox.report.cards import CellCard, cell_cards
from benchbox.report.cell_lists import CellLists
from benchbox.report.columns import CellValue, Column, columns, table_rows
from benchbox.report.environment import EnvironmentDifferences, environment_section, environment_texts, list_environment
from benchbox.report.equivalence import EquivalencePanel, equivalence_panel
from benchbox.report.figures import report_drawings
from benchbox.report.figures.cells import ReportCells
from benchbox.report.figures.memory import memory_sources
from benchbox.report.figures.phases import phase_notes
from benchbox.report.garbage_collection import paused_garbage_collection
from benchbox.report.headline import Headline, build_headline
from benchbox.report.observed import ObservedCell, requested_and_observed
from benchbox.report.precision import PrecisionGrid, precision_grid
from benchbox.report.ranks import RankSection, rank_section
from benchbox.report.sections import (
    Failure,
    FindingView,
    MethodRow,
    flatten_text,
    group_failures,
    group_skipped,
    list_failures,
    list_findings,
    list_methods,
)
from benchbox.report.theory import TheorySection, theory_section
from benchbox.report.walks import WalkSection, walk_section

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchbox.analysis.comparability import Comparison
    from benchbox.analysis.step_bounds import LinksOf, PeaksOf
    from benchbox.registry.launch_record import CellDict, LaunchRecord
    from benchbox.report.figures.drawing import Drawing
    from benchbox.store.predictions import CellPrediction
    from benchbox.store.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The comparison table. Rows have one value per column; `notes` appear below the table."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[CellValue, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a rendered report shows."""

    title: str
    summary: str  # one line on what was measured
    created_at: str
    version: str
    counts: tuple[tuple[str, int], ...]
    fixed: tuple[tuple[str, str], ...]  # fields that are equal in all cells
    settings: tuple[tuple[str, str], ...]  # equal fields of data and optimizer
    answers: tuple[AnswerBox, ...]
    headline: Headline
    walks: WalkSection | None  # only of a run that searches the largest batch
    axes: tuple[str, ...]  # fields in which cells differ
    table: Table
    cards: tuple[CellCard, ...]  # a cell each, in the order of the table
    figures: tuple[Drawing, ...]  # of all sections; no bars of a large run
    phase_notes: tuple[str, ...]  # to be read with the times of the phases
    equivalence: EquivalencePanel | None  # only of a run with cells that ask for the same training
    precision: PrecisionGrid | None  # only of a run that compares recipes
    ranks: RankSection | None  # only of a run with several ranks on one host
    theory: TheorySection | None  # only of a run with predictions
    findings: tuple[FindingView, ...]
    audited: int  # cells with a census
    observed: tuple[ObservedCell, ...]
    failures: tuple[Failure, ...]
    failure_groups: tuple[Failure, ...]  # one for all launches with equal status and message
    skipped: tuple[tuple[str, str], ...]  # cell, reason
    skipped_groups: tuple[tuple[str, str], ...]  # cells in short, reason
    environment: tuple[tuple[str, str], ...]
    differences: EnvironmentDifferences | None  # of environments; None where none was recorded
    method: tuple[MethodRow, ...]
    sampling: str
    chain_head: str | None  # of the plan and the records; null without one

    @property
    def overview_figures(self) -> tuple[Drawing, ...]:
        """Return the figures that Markdown shows: those that its tables do not replace."""
        return tuple(drawing for drawing in self.figures if drawing.section == "figures")

    @property
    def is_large(self) -> bool:
        """Return whether the page has the cards as compressed data, and lists in short what it otherwise lists cell by cell."""
        return len(self.table.rows) > MAX_PLAIN_CARDS


MAX_PLAIN_CARDS = 40  # with more cells, a report has no room for everything about every cell in plain HTML

_MARK_NOTES = {
    ONE_LAUNCH: f"{ONE_LAUNCH}: the cell was launched once, so the spread of its figures is unknown.",
    HIGH_SPREAD: f"{HIGH_SPREAD}: the step times of the slowest and the fastest launch differ by more than {MAX_SPREAD:.0%} of "
    "the median launch's.",
    BUSY_HOST: f"{BUSY_HOST}: in a launch of the cell, {BUSY_FORMULA}.",
    RECOMPILED: f"{RECOMPILED}: torch.compile compiled something in a measured step, so that these steps are not those of "
    "training; more warm-up steps help, unless shapes change.",
    PARTLY_COMPILED: f"{PARTLY_COMPILED}: a function ran uncompiled, because torch.compile gave it up or had reached its limit "
    "of variants of it.",
    PARTIAL_STEPS: f"{PARTIAL_STEPS}: in measured steps, optim.spike skipped the update of the weights or the backbone was "
    "frozen (optim.freeze_backbone_steps); whole steps take more time and memory.",
}


@paused_garbage_collection()
def build_report(
    run: Run,
    records: Iterable[LaunchRecord],
    *,
    chain_head: str | None = None,
    predictions: Mapping[str, CellPrediction] | None = None,
    unpredicted: Mapping[str, str] | None = None,
    memory_limit: int | None = None,
    peaks: PeaksOf | None = None,
    links: LinksOf | None = None,
) -> Report:
    """Build the report of a run.

    Args:
        records: those that exist, read one at a time.
        chain_head: of the chain of plan and records.
        predictions: by cell id.
        unpredicted: why cells have no prediction, by cell id.
        memory_limit: bytes of a rank, which the answer must fit in.
        peaks: returns those that were measured on a machine, by group of ranks.
        links: returns those that were measured on a machine, by backend of torch.distributed.
    """
    predictions = predictions or {}
    summaries = summarize(run, records)
    axes = varying_fields([*run.cells.values()])
    criteria = criteria_of(run)
    walks = certificates(run, summaries)
    compared = compare_run(run, summaries, walks, criteria)
    fitting = [summary for summary in summaries if not summary.beyond_memory]
    cells = ReportCells(summaries=fitting, axes=axes, walks=walks, compared=tuple(run.reference), max_bars=MAX_PLAIN_CARDS)
    bounds = step_bounds(predictions, summaries, peaks=peaks, links=links)
    table_columns = columns(axes, summaries, compared=bool(run.reference), predictions=predictions, bounds=bounds)
    example: CellDict = next(iter(run.cells.values()), {})
    common = {field: value for field, value in example.items() if field not in axes}
    fixed = tuple(
        (field, matrix_text(value)) for field, value in common.items() if value is not None and not isinstance(value, Mapping)
    )
    rows = table_rows(table_columns, summaries, compared.cells)
    cell_lists = CellLists([summary.cell for summary in summaries], axes)
    environments = environment_texts(summaries)
    machine = machine_of(summaries)
    measured_peaks = None if peaks is None else NO_MACHINE if machine is None else peaks(machine)
    observed = requested_and_observed(summaries, axes, measured_peaks)
    failures = tuple(list_failures(fitting, axes))
    skipped = [label(entry["cell"], varying_fields([example, entry["cell"]])) for entry in run.skipped]
    return Report(
        title=run.name,
        summary=_summary_line(run, axes),
        created_at=run.created_at.replace("T", " ").replace("+00:00", " UTC"),
        version=__version__,
        counts=_counts(run, summaries),
        fixed=fixed,
        settings=flatten_text({field: value for field, value in common.items() if isinstance(value, Mapping)}),
        answers=answer_boxes(
            summaries,
            axes,
            memory_limit=memory_limit,
            criteria=criteria,
            walks=walks,
            compared=(*compared.cells.values(), *compared.walks),
        ),
        headline=build_headline(
            _comparable(run, compared),
            axes,
            [summary.cell_id for summary in summaries],
            cell_lists,
            walks=compared.walks,
        ),
        walks=walk_section(walks, compared.walks, axes),
        axes=axes,
        cards=cell_cards(run, summaries, axes, table_columns, rows, {cell.cell_id: cell for cell in observed}),
        table=Table(
            columns=table_columns,
            rows=rows,
            notes=_table_notes(summaries, compared.cells),
        ),
        figures=report_drawings(cells),
        phase_notes=phase_notes(cells),
        equivalence=equivalence_panel(summaries, axes),
        precision=precision_grid(summaries, axes),
        ranks=rank_section(summaries, axes),
        theory=theory_section(predictions, summaries, axes, unpredicted or {}, bounds),
        findings=list_findings(summaries, axes, cell_lists),
        audited=sum(bool(summary.precision) for summary in summaries),
        observed=observed,
        failures=failures,
        failure_groups=group_failures(failures, summaries, axes, cell_lists),
        skipped=tuple(zip(skipped, (entry["reason"] for entry in run.skipped), strict=True)),
        skipped_groups=group_skipped(run.skipped, [*run.cells.values()], skipped),
        environment=list_environment(environments),
        differences=environment_section(environments, cell_lists),
        method=list_methods(),
        sampling=_sampling(run, summaries),
        chain_head=chain_head,
    )


@paused_garbage_collection()
def build_tables(run: Run, summaries: Sequence[CellSummary]) -> tuple[WalkSection | None, Table]:
    """Return the section of largest batches and the table of cells of a run, as in its report but without predictions."""
    axes, walks = varying_fields([*run.cells.values()]), certificates(run, summaries)
    compared = compare_run(run, summaries, walks, criteria_of(run))
    table_columns = columns(axes, summaries, compared=bool(run.reference))
    table = Table(columns=table_columns, rows=table_rows(table_columns, summaries, compared.cells))
    return walk_section(walks, compared.walks, axes), table


def _comparable(run: Run, compared: RunComparisons) -> list[Comparison]:
    """Return the comparisons of cells. Those of walks stand for their batches; until they have ended, the batches do.

    Batches that one of two walks did not try, or that do not fit, are left out: they are no failures.
    """
    walked = run.cells_of_walks
    return [
        comparison
        for cell_id, comparison in compared.cells.items()
        if cell_id not in walked
        or not (
            compared.walks
            or comparison.subject.beyond_memory
            or comparison.reference is None
            or comparison.reference.beyond_memory
        )
    ]


def _summary_line(run: Run, axes: Sequence[str]) -> str:
    varied = ", ".join(axes) if axes else "nothing"
    return f"{counted(len(run.cells), 'cell')} of {run.matrix_file}; {varied} varied."


def _sampling(run: Run, summaries: Sequence[CellSummary]) -> str:
    criteria, looks = criteria_of(run), ""
    if run.sequential:
        planned = [str(launches - bool(run.walks)) for launches in run.sequential["looks"]]
        taken = looks_taken(run)
        done = f"were tested after {', '.join(planned[:taken])} launches" if taken else "were not tested yet"
        to_come = f"; until all are settled, tests follow after {', '.join(planned[taken:])}" if planned[taken:] else ""
        looks = f" Pairs {done}{to_come}; the tests share a probability of 1%."
    if run.earlier_tests:
        numbers = " and ".join(str(launches - bool(run.walks)) for launches in run.earlier_tests)
        share = 100 * ALPHA * (len(run.earlier_tests) + 1)
        looks += (
            f" Pairs were tested after {numbers} launches before: all tests together are wrong in up to {share:.3g}% of runs."
        )
    warmup, steps = run.measure["warmup_steps"], run.measure["steps"]
    interleaved = ", cells interleaved" if _in_rounds(summaries) else ""
    launched = f"{_launched(run, summaries)}, each a fresh process group{interleaved}. A launch ran"
    if not any(summary.records for summary in summaries):
        launched = "No cell was launched. A launch is a fresh process group that would have run"
    return (
        f"{launched} {counted(warmup, 'warm-up step')}, reset its peaks, and measured {counted(steps, 'step')}. "
        "The launch is the sample: a figure is the median over launches of what each found over its steps, of a peak the "
        "highest, and a range goes from the lowest launch to the highest. "
        "A ratio is the median over all pairs of launches of common rounds, or with ten rounds or more for one pair the median "
        "of the mean ratios of all pairs of rounds, and its interval has the ratios that an exact "
        "permutation test of the launches, or one for unequal scatter (Welch), does not reject at "
        f"{100 * criteria.alpha:.2g}%. A pair is settled when the tests, corrected for the number of pairs by Holm's "
        f"procedure, reject equality and the ratio is at least {100 * criteria.relevant:.3g}% from 1, or if an "
        f"interval for all pairs at once is within that.{looks}"
    )


def _launched(run: Run, summaries: Sequence[CellSummary]) -> str:
    """Return how often cells were launched, and how often the plan says if that is another number."""
    fastest = {walk["fastest"] for walk in run.walks}
    counts = [len(summary.records) for summary in summaries if not run.walks or summary.cell_id in fastest]
    if not counts:
        return "Batches of walks were launched once"
    least, most = min(counts), max(counts)
    times = counted(most, "time") if least == most else f"{least} to {counted(most, 'time')}"
    planned = f", of {run.launches} planned" if least < run.launches and not run.sequential else ""
    if run.walks:
        return f"Every batch of a walk was launched once, and its fastest {times}{planned}"
    return f"Every cell was launched {times}{planned}"


def _in_rounds(summaries: Sequence[CellSummary]) -> bool:
    """Return whether several cells were launched in turns: no launch before one of an earlier round."""
    launches = sorted((record["started_at"], record["launch"]) for summary in summaries for record in summary.records)
    rounds = [launch for _, launch in launches]
    return sum(bool(summary.records) for summary in summaries) > 1 and rounds[-1] > 1 and rounds == sorted(rounds)


def _counts(run: Run, summaries: Sequence[CellSummary]) -> tuple[tuple[str, int], ...]:
    fitting = [summary for summary in summaries if not summary.beyond_memory]
    statuses = Counter(summary.status for summary in fitting)
    ok = sum(summary.complete for summary in fitting)
    counts = {
        "cell" if len(summaries) == 1 else "cells": len(summaries),
        "ok": ok,
        "diverged": statuses[DIVERGED],
        "failed": len(fitting) - statuses["ok"] - statuses[DIVERGED] - statuses[MISSING],
        "incomplete": statuses["ok"] - ok,
        "missing": statuses[MISSING],
        "beyond memory": len(summaries) - len(fitting),
        "skipped": len(run.skipped),
    }
    return tuple((name, count) for name, count in counts.items() if count or name == "ok")


def _table_notes(summaries: Sequence[CellSummary], comparisons: Mapping[str, Comparison]) -> tuple[str, ...]:
    memories = [record["memory"] for summary in summaries for record in summary.ok if record["memory"]]
    reasons = dict.fromkeys(memory["reason"] for memory in memories if memory["reason"])
    notes = [f"Memory source {text}." for text in memory_sources(summaries)]
    notes += [f"Peak reserved is unknown: {reason}." for reason in reasons]
    if any(comparison.verdict == "inconclusive" for comparison in comparisons.values()):
        notes.append("A ratio marked ~ is not settled by the launches: chance may explain it.")
    marks = {mark for summary in summaries for mark in summary.marks}
    return (*notes, *(note for mark, note in _MARK_NOTES.items() if mark in marks))
