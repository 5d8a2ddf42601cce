"""What each recipe did to the same training in each place: the grid that shows where updates arrive and where they are lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.analysis.comparability import adam_dtypes
from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import label, plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.analysis.summary import CellSummary

# As the audit judges them (BXP102).
_EDQ_GOOD, _EDQ_BAD = 0.9, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionCell:
    """One recipe in one place. `level` is ok, warning, error or missing; `details` are lines below the EDQ."""

    edq: str
    level: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionGrid:
    """Recipes by places; a place is everything else that varies."""

    places: tuple[str, ...]
    rows: tuple[tuple[str, tuple[PrecisionCell, ...]], ...]  # recipe, a cell for each place


def precision_grid(summaries: Sequence[CellSummary], axes: Sequence[str]) -> PrecisionGrid | None:
    """The grid of a run that compares recipes; None of any other."""
    if "recipe" not in axes:
        return None
    fields = _telling([summary.cell for summary in summaries], [axis for axis in axes if axis != "recipe"])
    places = tuple(dict.fromkeys(label(summary.cell, fields) for summary in summaries))
    recipes = dict.fromkeys(summary.cell["recipe"] for summary in summaries)
    held = {(summary.cell["recipe"], label(summary.cell, fields)): summary for summary in summaries}
    return PrecisionGrid(
        places=places,
        rows=tuple((recipe, tuple(_cell(held.get((recipe, place))) for place in places)) for recipe in recipes),
    )


def _telling(cells: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> list[str]:
    """The axes that tell places apart, without those that follow from others."""
    kept: list[str] = []
    for axis in axes:
        told = {tuple(plain(cell.get(field)) for field in kept) for cell in cells}
        if len({tuple(plain(cell.get(field)) for field in [*kept, axis]) for cell in cells}) > len(told):
            kept.append(axis)
    return kept


def _cell(summary: CellSummary | None) -> PrecisionCell:
    if summary is None:
        return PrecisionCell(edq="-", level="missing", details=("not supported",))
    values = {name: spread.value for name, spread in summary.values.items() if spread is not None}
    edq = values.get("edq")
    if edq is None or summary.evidence is None:
        return PrecisionCell(edq="-", level="missing", details=(summary.status,))
    level = "ok" if edq >= _EDQ_GOOD else ("warning" if edq >= _EDQ_BAD else "error")
    details = (
        [f"{quantity(values['updates_lost'], 'fraction', 2)} of updates moved nothing"] if "updates_lost" in values else []
    )
    if (stalled := values.get("second_moment_stalled")) is not None:
        details.append(f"v stalls: {quantity(stalled, 'fraction', 2)}")
    details.append(f"Adam state {', '.join(adam_dtypes(summary.evidence))}")
    if (loss := values.get("final_loss")) is not None:
        details.append(f"loss {quantity(loss, 'loss', 5)}")
    return PrecisionCell(edq=f"{edq:.3f}", level=level, details=tuple(details))
