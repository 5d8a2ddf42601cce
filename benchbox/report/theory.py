"""The section of a report that lays predictions beside measurements."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.quantities import UNKNOWN, quantity
from benchbox.analysis.reconciliation import MEMORY_TOLERANCE, STEP_TIME, Reconciliation, reconcile
from benchbox.analysis.step_bounds import NO_BOUNDS, StepBounds
from benchbox.analysis.summary import CellSummary, label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.store.predictions import CellPrediction

MAX_ROWS = 40  # the table of cells has the predictions of every cell

HEADERS = ("cell", "quantity", "predicted", "measured", "error", "verdict", "residual")
NOTE = (
    "Predicted from a trace of one step of one process, without the measurements. Memory is confirmed within "
    f"{MEMORY_TOLERANCE:.0%}; communication when every call and every byte is as predicted."
)
TIME_NOTE = (
    "The step time is a lower bound: products of the smallest step and the optimizer at the measured peaks of the machine, or "
    "collectives on its measured links, whichever takes longer. It is confirmed when the measured step is not shorter by more "
    "than the spread of these rates, and its error is the distance to the bound."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TheorySection:
    """Rows of text under `HEADERS`, the numbers of verdicts in words if there are any, and a sentence about rows left out."""

    rows: tuple[tuple[str, ...], ...]
    counts: str
    left_out: str
    note: str
    headers: tuple[str, ...] = HEADERS

    @property
    def text(self) -> str:
        """The sentences above the rows."""
        return " ".join(filter(None, (self.note, f"{self.counts}." if self.counts else "", self.left_out)))


def theory_section(
    predictions: Mapping[str, CellPrediction],
    summaries: Sequence[CellSummary],
    axes: Sequence[str],
    unpredicted: Mapping[str, str],
    bounds: StepBounds = NO_BOUNDS,
) -> TheorySection | None:
    """Return the section, or None for a run without predictions. `unpredicted` says why cells have none.

    Of more than `MAX_ROWS` rows it has the first by rank: those that are not confirmed, then the largest errors. The distance
    of a step to its lower bound is no error of the prediction, and comes last.
    """
    rows: list[tuple[tuple[bool, bool, float], tuple[str, ...]]] = []
    verdicts: Counter[str] = Counter()
    for summary in summaries:
        if summary.beyond_memory:
            continue
        if reason := unpredicted.get(summary.cell_id):
            texts = ("all", UNKNOWN, UNKNOWN, UNKNOWN, "not predicted", reason)
            rows.append(((False, False, -math.inf), (label(summary.cell, axes), *texts)))
        prediction = predictions.get(summary.cell_id)
        for entry in () if prediction is None else reconcile(prediction, summary, bounds.by_cell.get(summary.cell_id)):
            error = math.inf if entry.error is None else abs(entry.error)
            is_confirmed = entry.verdict == "confirmed"
            rank = (is_confirmed, is_confirmed and entry.quantity == STEP_TIME, -error)
            rows.append((rank, (label(summary.cell, axes), *_texts(entry))))
            verdicts[f"{entry.quantity} {entry.verdict}"] += 1
    if not rows:
        return None
    left_out = ""
    if len(rows) > MAX_ROWS:
        left_out = (
            f"Of {len(rows)} rows, {MAX_ROWS} are shown: first what is not confirmed, then the largest errors"
            f"{', and step times last' if bounds.by_cell else ''}. "
            "The table of cells has the predictions of every cell."
        )
        rows = sorted(rows, key=lambda row: row[0])[:MAX_ROWS]
    counts = ", ".join(f"{name}: {count}" for name, count in sorted(verdicts.items()))
    note = " ".join(filter(None, (NOTE, TIME_NOTE if bounds.by_cell else "", bounds.note)))
    return TheorySection(rows=tuple(texts for _, texts in rows), counts=counts, left_out=left_out, note=note)


def _texts(entry: Reconciliation) -> tuple[str, ...]:
    error = UNKNOWN if entry.error is None else f"{entry.error:+.2%}"
    predicted, measured = (quantity(value, entry.unit, 4) for value in (entry.predicted, entry.measured))
    return entry.quantity, predicted, measured, error, entry.verdict, entry.residual
