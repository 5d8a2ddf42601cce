"""The section of a report that lays predictions beside measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.quantities import UNKNOWN, quantity
from benchbox.analysis.reconciliation import MEMORY_TOLERANCE, Reconciliation, reconcile
from benchbox.analysis.summary import CellSummary, label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.store.predictions import CellPrediction

HEADERS = ("cell", "quantity", "predicted", "measured", "error", "verdict", "residual")
NOTE = (
    "Predicted from a trace of the step on fake tensors, without the measurements. Memory is confirmed within "
    f"{MEMORY_TOLERANCE:.0%}; communication when every call and every byte is as predicted."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TheorySection:
    """Rows of text under `HEADERS`, and the numbers of verdicts in words."""

    rows: tuple[tuple[str, ...], ...]
    counts: str
    note: str = NOTE
    headers: tuple[str, ...] = HEADERS


def theory_section(
    predictions: Mapping[str, CellPrediction],
    summaries: Sequence[CellSummary],
    axes: Sequence[str],
    unpredicted: Mapping[str, str],
) -> TheorySection | None:
    """Return the section, or None for a run without predictions. `unpredicted` says why cells have none."""
    rows: list[tuple[str, ...]] = []
    verdicts: dict[str, int] = {}
    for summary in summaries:
        if summary.beyond_memory:
            continue
        if reason := unpredicted.get(summary.cell_id):
            rows.append((label(summary.cell, axes), "all", UNKNOWN, UNKNOWN, UNKNOWN, "not predicted", reason))
        prediction = predictions.get(summary.cell_id)
        for entry in () if prediction is None else reconcile(prediction, summary):
            rows.append((label(summary.cell, axes), *_texts(entry)))
            name = f"{entry.quantity} {entry.verdict}"
            verdicts[name] = verdicts.get(name, 0) + 1
    if not rows:
        return None
    return TheorySection(rows=tuple(rows), counts=", ".join(f"{name}: {count}" for name, count in sorted(verdicts.items())))


def _texts(entry: Reconciliation) -> tuple[str, ...]:
    error = UNKNOWN if entry.error is None else f"{entry.error:+.2%}"
    measured = quantity(entry.measured, "bytes", 4)
    return entry.quantity, quantity(entry.predicted, "bytes", 4), measured, error, entry.verdict, entry.residual
