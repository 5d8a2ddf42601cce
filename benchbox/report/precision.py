"""The precision grid of a report: how each recipe changes the same training under each condition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.adam_state import adam_dtypes
from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import label, matrix_text
from benchbox.audit.thresholds import EDQ_ERROR, EDQ_WARNING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import CellDict

_LEVELS = ("ok", "missing", "warning", "error")  # the worst last
_FINDING_LEVELS = {"error": "error", "warning": "warning", "unknown": "missing"}  # a note changes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionCell:
    """One recipe under one condition. `level` is ok, warning, error or missing; `details` are lines below the EDQ."""

    edq: str
    level: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionGrid:
    """Recipes by conditions. A condition is everything else that varies."""

    conditions: tuple[str, ...]
    rows: tuple[tuple[str, tuple[PrecisionCell, ...]], ...]  # recipe, a cell for each condition


def precision_grid(summaries: Sequence[CellSummary], axes: Sequence[str]) -> PrecisionGrid | None:
    """Return the grid of a run that compares recipes; None for any other."""
    if "recipe" not in axes:
        return None
    fields = _distinguishing([summary.cell for summary in summaries], [axis for axis in axes if axis != "recipe"])
    conditions = tuple(dict.fromkeys(label(summary.cell, fields) for summary in summaries))
    recipes = dict.fromkeys(summary.cell["recipe"] for summary in summaries)
    by_position = {(summary.cell["recipe"], label(summary.cell, fields)): summary for summary in summaries}
    return PrecisionGrid(
        conditions=conditions,
        rows=tuple(
            (recipe, tuple(_cell(by_position.get((recipe, condition))) for condition in conditions)) for recipe in recipes
        ),
    )


def _distinguishing(cells: Sequence[CellDict], axes: Sequence[str]) -> list[str]:
    """Return the axes that distinguish conditions, without those that follow from earlier ones."""
    fields: list[str] = []
    for axis in axes:
        if len(_combinations(cells, [*fields, axis])) > len(_combinations(cells, fields)):
            fields.append(axis)
    return fields


def _combinations(cells: Sequence[CellDict], fields: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(matrix_text(cell.get(field)) for field in fields) for cell in cells}


def _cell(summary: CellSummary | None) -> PrecisionCell:
    if summary is None:
        return PrecisionCell(edq="-", level="missing", details=("no such cell",))
    values = {name: spread.value for name, spread in summary.values.items() if spread is not None}
    edq = values.get("edq")
    if summary.evidence is None:
        return PrecisionCell(edq="-", level="missing", details=(summary.status,))
    findings = summary.precision["findings"] if summary.precision else []
    level = max(_level(edq), *(_FINDING_LEVELS.get(finding["severity"], "ok") for finding in findings), "ok", key=_LEVELS.index)
    details = []
    codes = sorted({finding["code"] for finding in findings})
    if codes:
        details.append(", ".join(codes))
    if "updates_lost" in values:
        details.append(f"{quantity(values['updates_lost'], 'fraction', 2)} of updates moved nothing")
    if (stalled := values.get("second_moment_stalled")) is not None:
        details.append(f"v stalls: {quantity(stalled, 'fraction', 2)}")
    if dtypes := adam_dtypes(summary.evidence):
        details.append(f"Adam state {', '.join(dtypes)}")
    if (loss := values.get("final_loss")) is not None:
        details.append(f"loss {quantity(loss, 'loss', 5)}")
    return PrecisionCell(edq="-" if edq is None else f"{edq:.3f}", level=level, details=tuple(details))


def _level(edq: float | None) -> str:
    if edq is None:
        return "missing"
    return "ok" if edq >= EDQ_WARNING else ("warning" if edq >= EDQ_ERROR else "error")
