"""The equivalence panel: differences of loss and gradient norm of every cell from those of its reference, with tolerances."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.equivalence import NAMES, QUANTITIES
from benchbox.analysis.quantities import UNKNOWN, quantity
from benchbox.analysis.summary import label, varying_fields
from benchbox.registry.recipes import JUDGED_STEPS
from benchbox.report.charts import CHARACTER, GAP, HALF, Tick, nice_ticks
from benchbox.report.curves import AXIS_HEIGHT, HEIGHT, MAX_CURVES, TOP, Curve, CurveChart, YTick, line_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.analysis.equivalence import Difference, Equivalence, Quantity, Verdict
    from benchbox.analysis.summary import CellSummary

MAX_CHARTED_GROUPS = 4  # more charts than this are not looked at
MIN_CHARTED_STEPS = 10  # fewer show no course
MAX_TERMINAL_ROWS = 30  # with more cells, a terminal shows those that are not equivalent

NOTE = (
    "Cells that ask for the same training differ in backend, ranks, micro-batches, attention kernel, checkpointing or "
    "compilation: that changes the order of sums and nothing else. Differences are relative to the reference, at the step "
    f"where they are largest in units of the recipe's tolerance; the first {JUDGED_STEPS} steps, warm-up included, are judged."
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
    """All cells of a run, and the courses of the differences where there are few enough groups to draw."""

    summary: str
    rows: tuple[EquivalenceRow, ...]
    charts: tuple[CurveChart, ...]

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
    if not any(equivalence.differences for _, equivalence in judged):
        return None
    counts = Counter(equivalence.verdict for _, equivalence in judged)
    verdicts: tuple[Verdict, ...] = ("reference", "equivalent", "diverged", "not compared")
    texts = [f"{counts[verdict]} {verdict}" for verdict in verdicts if counts[verdict]]
    return EquivalencePanel(
        summary=f"{len(judged)} cells: {', '.join(texts)}.",
        rows=tuple(_row(summary, equivalence, axes) for summary, equivalence in judged),
        charts=tuple(_charts(judged)),
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
        reason=(equivalence.reason or "") if equivalence.verdict == "not compared" else "",  # differences explain the others
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


def _charts(judged: Sequence[tuple[CellSummary, Equivalence]]) -> list[CurveChart]:
    groups: dict[str, list[tuple[CellSummary, Mapping[Quantity, Difference]]]] = defaultdict(list)
    for summary, equivalence in judged:
        steps = [len(difference.values) for difference in (equivalence.differences or {}).values()]
        if equivalence.reference is not None and equivalence.differences and min(steps) >= MIN_CHARTED_STEPS:
            groups[equivalence.reference.cell_id].append((summary, equivalence.differences))
    if len(groups) > MAX_CHARTED_GROUPS:
        return []
    references = {equivalence.reference.cell_id: equivalence.reference for _, equivalence in judged if equivalence.reference}
    all_fields = varying_fields([reference.cell for reference in references.values()])
    charts = []
    for number, (cell_id, group) in enumerate(groups.items()):
        if len(group) >= MAX_CURVES:  # the tolerance has a colour too
            continue
        fields = varying_fields([references[cell_id].cell, *(summary.cell for summary, _ in group)])
        shared = label(references[cell_id].cell, all_fields) if len(groups) > 1 else label(references[cell_id].cell, fields)
        for name in QUANTITIES:
            courses = [(label(summary.cell, fields), differences[name]) for summary, differences in group]
            charts.append(_chart(f"equivalence-{number}-{name}", name, shared, courses))
    return charts


def _chart(key: str, name: Quantity, reference: str, courses: Sequence[tuple[str, Difference]]) -> CurveChart:
    """Draw differences by step on a logarithmic scale, with the tolerance as the last curve. No difference lies on the axis."""
    tolerances = max((difference.tolerances for _, difference in courses), key=len)
    curves: list[tuple[str, str, Sequence[float | None]]] = [
        (name, f"s{index}", difference.values) for index, (name, difference) in enumerate(courses)
    ]
    curves.append(("tolerance", "limit", tolerances))
    positive = [value for _, _, values in curves for value in values if value is not None and 0 < value < math.inf]
    low, high = math.floor(math.log10(min(positive) / 2)), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)
    left = len(f"1e{low}") * CHARACTER + GAP
    steps = max(len(values) for _, _, values in curves)
    per_step, per_decade = (HALF - left - 2 * GAP) / max(steps - 1, 1), (HEIGHT - AXIS_HEIGHT - TOP) / (high - low)
    bottom = HEIGHT - AXIS_HEIGHT

    def y_of(value: float) -> float:
        return bottom - (min(max(math.log10(value), low), high) - low) * per_decade if value > 0 else bottom

    every = math.ceil((high - low) / 6)
    return CurveChart(
        key=key,
        title=f"Difference of the {NAMES[name]} by step",
        description=f"Relative to {reference}, on a logarithmic scale: no difference lies on the axis, and a cell above the "
        "tolerance is diverged.",
        curves=tuple(
            Curve(
                name=curve_name,
                colour=colour,
                path=line_path([None if v is None else (left + i * per_step, y_of(v)) for i, v in enumerate(values)]),
                last=next((value for value in reversed(values) if value is not None), 0.0),
            )
            for curve_name, colour, values in curves
        ),
        x_ticks=tuple(
            Tick(x=left + step * per_step, text=f"{step:g}") for step in nice_ticks(max(steps - 1, 1)) if step % 1 == 0
        ),
        y_ticks=tuple(YTick(y=bottom - (power - low) * per_decade, text=f"1e{power}") for power in range(low, high + 1, every)),
        left=left,
    )
