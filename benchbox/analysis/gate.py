"""The gate: each demand on each selected cell, with the expected and the actual value. A cell that did not run never passes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import MISSING, CellSummary, label, metric_words, varying_fields
from benchbox.registry.metrics import Metric, metric_by_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchbox.store.baseline import Baseline
    from benchbox.store.run import Run

Verdict = Literal["ok", "breach", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """One demand on one cell. `note` says what to do where the verdict alone does not."""

    cell_id: str | None  # None: the demand selects no cell
    cell: str  # its label
    metric: str
    expected: str
    actual: str
    verdict: Verdict
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON output; there the actual value is called `found`."""
        return {{"actual": "found"}.get(key, key): value for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class BaselineLookup:
    """The baseline to compare with, or why there is none and what to do about it."""

    baseline: Baseline | None
    remedy: str | None


def verdict_of(rows: Sequence[GateRow]) -> Verdict:
    """Return the verdict on a run: `missing` when nothing is breached, but a value or the baseline to judge by is absent."""
    verdicts = {row.verdict for row in rows}
    if "breach" in verdicts or not verdicts:
        return "breach"
    return "missing" if "missing" in verdicts else "ok"


def gate(run: Run, summaries: Sequence[CellSummary], lookup: BaselineLookup) -> list[GateRow]:
    """Return a row for the state of every cell, then rows for every threshold of the run in its order.

    Numbers are read from launches that ended ok. The state rows cannot be switched off: a cell that failed, or of which
    launches are missing, is a breach whether or not a threshold asks for `status`.
    """
    fields = varying_fields(summary.cell for summary in summaries)
    rows = [_state_row(summary, fields) for summary in summaries]
    for threshold in run.thresholds:
        where = threshold.get("where") or {}
        selected = [summary for summary in summaries if all(summary.cell.get(k) == v for k, v in where.items())]
        if not selected:
            rows.append(_unmatched_row(run, threshold, where))
        for summary in selected:
            rows += _demand_rows(threshold, summary, fields, lookup)
    # A threshold that repeats the demand of a state row adds nothing.
    return list(dict.fromkeys(rows))


def _state_row(summary: CellSummary, fields: Sequence[str]) -> GateRow:
    actual = summary.status
    verdict: Verdict = "ok" if actual == "ok" else "breach"
    note = None
    if summary.status == MISSING:
        verdict, note = "missing", "it has not run: run the matrix again, finished launches are kept"
    elif summary.status == "ok" and not summary.complete:
        actual, verdict = f"ok in {len(summary.ok)} of {summary.planned} launches", "missing"
        note = "run the matrix again, finished launches are kept"
    elif summary.error:
        note = f"{summary.error['type']}: {summary.error['message']}".splitlines()[0]
    return _row(summary, fields, "status", "ok", actual, verdict, note)


def _unmatched_row(run: Run, threshold: Mapping[str, Any], where: Mapping[str, Any]) -> GateRow:
    skipped = [entry for entry in run.skipped if all(entry["cell"].get(k) == v for k, v in where.items())]
    note = f"every cell it selects was skipped: {skipped[0]['reason']}" if skipped else "no cell of the matrix has these values"
    return GateRow(
        cell_id=None,
        cell=label(where, where) if where else "every cell",
        metric=threshold["metric"],
        expected="a cell that matches",
        actual="matches nothing",
        verdict="breach",
        note=note,
    )


def _demand_rows(
    threshold: Mapping[str, Any], summary: CellSummary, fields: Sequence[str], lookup: BaselineLookup
) -> Iterator[GateRow]:
    metric = metric_by_name(threshold["metric"])
    if not metric.is_number:
        expected = str(threshold.get("expect"))
        actual = summary.status if metric.name == "status" else metric_words(metric, summary.records) or MISSING
        if metric.name == "status" and expected == "ok":
            yield _state_row(summary, fields)
        else:
            yield _row(summary, fields, metric.name, expected, actual, "ok" if actual == expected else "breach")
        return
    spread = summary.values[metric.name]

    def number(value: float) -> str:
        return quantity(value, metric.unit, digits=4)

    for text, bounds, remedy in _ranges(threshold, metric, summary.cell_id, lookup):
        if spread is None:
            reason = "no launch ended ok" if not summary.ok else "no launch could measure it"
            yield _row(summary, fields, metric.name, text, "no value", "missing", reason)
        elif bounds is None:
            yield _row(summary, fields, metric.name, text, number(spread.value), "missing", remedy)
        else:
            low, high = bounds
            verdict: Verdict = "ok" if low <= spread.value <= high else "breach"
            yield _row(summary, fields, metric.name, text, number(spread.value), verdict)


def _ranges(
    threshold: Mapping[str, Any], metric: Metric, cell_id: str, lookup: BaselineLookup
) -> Iterator[tuple[str, tuple[float, float] | None, str | None]]:
    """Yield each demand as text with the closed range it allows, or with None and the remedy if there is no baseline value."""

    def number(value: float) -> str:
        return quantity(value, metric.unit, digits=4)

    infinity = float("inf")
    if (expect := threshold.get("expect")) is not None:
        yield f"= {number(expect)}", (float(expect), float(expect)), None
    if (low := threshold.get("min")) is not None:
        yield f">= {number(low)}", (low, infinity), None
    if (high := threshold.get("max")) is not None:
        yield f"<= {number(high)}", (-infinity, high), None
    if (allowed := threshold.get("max_regression")) is None:
        return
    text = f"within {allowed * 100:g}% of the baseline"
    if lookup.baseline is None:
        yield text, None, lookup.remedy
        return
    base = lookup.baseline.value(cell_id, metric.name)
    if base is None:
        yield text, None, "the baseline does not have it: promote a run of today's matrix"
        return
    worse, better = base + allowed * abs(base), base - allowed * abs(base)
    if metric.direction == "lower":
        yield f"<= {number(worse)} (baseline {number(base)} + {allowed * 100:g}%)", (-infinity, worse), None
    elif metric.direction == "higher":
        yield f">= {number(better)} (baseline {number(base)} - {allowed * 100:g}%)", (better, infinity), None
    else:
        yield f"{number(better)} .. {number(worse)} (baseline {number(base)} +- {allowed * 100:g}%)", (better, worse), None


def _row(
    summary: CellSummary,
    fields: Sequence[str],
    name: str,
    expected: str,
    actual: str,
    verdict: Verdict,
    note: str | None = None,
) -> GateRow:
    return GateRow(
        cell_id=summary.cell_id,
        cell=label(summary.cell, fields),
        metric=name,
        expected=expected,
        actual=actual,
        verdict=verdict,
        note=note,
    )
