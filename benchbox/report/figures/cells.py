"""Cells as the figures see them: their task, the name of their set-up, and how they are told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.answers import SETUP_FIELDS
from benchbox.analysis.summary import label, matrix_text, short_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.analysis.certificates import Certificate
    from benchbox.analysis.summary import CellSummary

MAX_PANELS = 12
_DOT = " \N{MIDDLE DOT} "
# The first that differs has the colours.
SERIES_FIELDS = ("backend", "recipe", "policy", "attention", "checkpointing", "compile", "padding", "order")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCells:
    """Cells of a report that its figures show, without those that do not fit into memory."""

    summaries: Sequence[CellSummary]
    axes: Sequence[str]  # fields in which cells differ
    walks: Sequence[Certificate] = ()  # certificates, of a run that searches the largest batch
    compared: Sequence[str] = ()  # fields of the reference
    max_bars: int

    @property
    def are_too_many_for_bars(self) -> bool:
        """Return whether bars of all cells could not be read."""
        return len(self.summaries) > self.max_bars


class BarNames:
    """Group, name and colour of the bar of every cell. Cells that differ only in the compared fields form a group."""

    def __init__(self, cells: ReportCells) -> None:
        self._series = [field for field in cells.compared if field in cells.axes] or list(cells.axes[:1])
        self._context = [field for field in cells.axes if field not in self._series]
        self._names = list(dict.fromkeys(map(self.name, cells.summaries)))

    def group(self, summary: CellSummary) -> str:
        return label(summary.cell, self._context) if self._context else ""

    def name(self, summary: CellSummary) -> str:
        return short_label(summary.cell, self._series)

    def colour(self, summary: CellSummary) -> str:
        return f"s{self._names.index(self.name(summary))}"


def row_heading(fields: Sequence[str]) -> str:
    """Return what the parts of `row_name` are."""
    return f"rows: {_DOT.join(fields)}"


def row_name(summary: CellSummary, fields: Sequence[str]) -> str:
    """Return the values of a cell, without the names of the fields: half as long as a label, for figures of many rows."""
    return _DOT.join(matrix_text(summary.cell.get(field)) for field in fields)


def launches_note(summary: CellSummary) -> str:
    """Return the note beside a number of a cell in which not every launch ended ok, or that trains differently."""
    if summary.complete:
        return ""
    return f" ({len(summary.ok)}/{summary.planned} ok)" if len(summary.ok) < summary.planned else f" ({summary.status})"


def by_task(summaries: Sequence[CellSummary], axes: Sequence[str]) -> dict[str, list[CellSummary]]:
    """Return the cells of each task, which do the same work per sample, by its text."""
    fields = [field for field in axes if field not in SETUP_FIELDS]
    tasks: dict[str, list[CellSummary]] = {}
    for summary in summaries:
        tasks.setdefault(label(summary.cell, fields) if fields else "", []).append(summary)
    return tasks


def series_field(axes: Sequence[str]) -> str | None:
    """Return the field whose values have colours and markers of their own."""
    return next((field for field in SERIES_FIELDS if field in axes), None)


def series_values(summaries: Sequence[CellSummary], field: str | None) -> list[str]:
    """Return the values of the field in the order of the cells; one empty text without a field."""
    return list(dict.fromkeys(series_of(summary, field) for summary in summaries))


def series_of(summary: CellSummary, field: str | None) -> str:
    """Return the series that a cell belongs to."""
    return "" if field is None else short_label(summary.cell, [field])


def setup_name(summary: CellSummary, axes: Sequence[str], field: str | None) -> str:
    """Return the fields of a set-up beside its task and its series."""
    fields = [name for name in axes if name in SETUP_FIELDS and name != field]
    return label(summary.cell, fields) if fields else ""


def throughput(summary: CellSummary) -> float | None:
    """Return the global samples per second of a cell that ended ok."""
    spread = summary.values["global_samples_per_s"]
    return None if spread is None else spread.value
