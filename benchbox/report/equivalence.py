"""The equivalence panel: differences of loss and gradient norm of every cell from those of its reference, with tolerances."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.equivalence import QUANTITIES
from benchbox.analysis.quantities import UNKNOWN, counted, quantity
from benchbox.analysis.summary import label
from benchbox.registry.recipes import JUDGED_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.analysis.equivalence import Difference, Equivalence, EquivalenceVerdict
    from benchbox.analysis.summary import CellSummary

MAX_TERMINAL_ROWS = 30  # with more cells, a terminal shows those that are not equivalent

NOTE = (
    "Cells that ask for the same training differ in backend, ranks, micro-batches, attention kernel, checkpointing, "
    "compilation or padding: that changes the order of sums and nothing else. Differences are relative to the reference, at "
    "the step where they are largest in units of the recipe's tolerance; "
    f"the first {JUDGED_STEPS} steps, warm-up included, are judged."
)
HEADERS = ("cell", "verdict", "loss differs by", "gradient norm differs by", "reference", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceRow:
    """One cell. Differences name their step and the tolerance there."""

    cell: str
    verdict: str
    differences: tuple[str, ...]  # by quantity
    reference: str
    reason: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts under `HEADERS`."""
        return (self.cell, self.verdict, *self.differences, self.reference, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalencePanel:
    """All cells of a run whose trainings are compared; figures have the courses of the differences."""

    summary: str
    rows: tuple[EquivalenceRow, ...]

    @property
    def brief_rows(self) -> tuple[EquivalenceRow, ...]:
        """The rows that a terminal shows."""
        if len(self.rows) <= MAX_TERMINAL_ROWS:
            return self.rows
        return tuple(row for row in self.rows if row.verdict == "diverged")


def equivalence_panel(summaries: Sequence[CellSummary], axes: Sequence[str]) -> EquivalencePanel | None:
    """Return the panel; None for a run in which no two launches ask for the same training."""
    measured = [summary for summary in summaries if not summary.beyond_memory]
    judged = [(summary, summary.equivalence) for summary in measured if summary.equivalence is not None]
    if not any(equivalence.differences or equivalence.verdict == "diverged" for _, equivalence in judged):
        return None
    counts = Counter(equivalence.verdict for _, equivalence in judged)
    verdicts: tuple[EquivalenceVerdict, ...] = ("reference", "equivalent", "diverged", "not compared")
    texts = [f"{counts[verdict]} {verdict}" for verdict in verdicts if counts[verdict]]
    return EquivalencePanel(
        summary=f"{counted(len(judged), 'cell')}: {', '.join(texts)}.",
        rows=tuple(_row(summary, equivalence, axes) for summary, equivalence in judged),
    )


def _row(summary: CellSummary, equivalence: Equivalence, axes: Sequence[str]) -> EquivalenceRow:
    reference = equivalence.reference
    is_base = reference is not None and reference.cell_id == summary.cell_id
    differences = equivalence.differences or {}
    return EquivalenceRow(
        cell=label(summary.cell, axes),
        verdict=equivalence.verdict,
        differences=tuple(difference_text(differences[name]) if name in differences else UNKNOWN for name in QUANTITIES),
        reference=_reference_text(reference, axes, is_base=is_base, is_compared=bool(differences)),
        reason=equivalence.reason or "" if equivalence.verdict == "not compared" or not differences else "",
    )


def _reference_text(reference: CellSummary | None, axes: Sequence[str], *, is_base: bool, is_compared: bool) -> str:
    if reference is None or (is_base and not is_compared):
        return UNKNOWN
    return "its own first launch" if is_base else label(reference.cell, axes)


def difference_text(difference: Difference) -> str:
    """Return `0.12% in step 4 (tolerance 1.25%)` for a difference with its step and tolerance."""
    if difference.largest is None or difference.tolerance is None:
        return UNKNOWN
    if difference.largest == 0:
        return "nothing"
    largest, tolerance = quantity(difference.largest, "fraction", 2), quantity(difference.tolerance, "fraction")
    return f"{largest} in step {difference.step} (tolerance {tolerance})"
