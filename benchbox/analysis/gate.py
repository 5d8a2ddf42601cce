"""The gate: each demand on each selected cell, with the expected and the actual value. A cell that did not run never passes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from benchbox.analysis.quantities import quantity
from benchbox.analysis.regression import has_noise, judge_regression
from benchbox.analysis.summary import MISSING, CellSummary, label, varying_fields
from benchbox.registry.metrics import Metric, metric_by_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchbox.analysis.regression import BaselineLookup, Verdict
    from benchbox.store.run import Run


GateVerdict = Literal["ok", "inconclusive", "missing", "breach", "warning", "accepted"]
EXCUSED = ("warning", "accepted")  # verdicts on breaches that fail nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """One demand on one cell. `note` says what to do where the verdict alone does not."""

    cell_id: str | None  # None: the demand selects no cell
    cell: str  # its label
    metric: str
    expected: str
    actual: str
    verdict: GateVerdict
    note: str | None = None
    threshold: int | None = field(default=None, compare=False)  # its index in the run; None: the state of a cell
    file: str | None = field(default=None, compare=False)  # of the test that measured a ratio

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON output; there the actual value is called `found`."""
        names = {"actual": "found"}
        return {names.get(key, key): value for key, value in asdict(self).items() if key not in ("threshold", "file")}


def verdict_of(rows: Sequence[GateRow]) -> Verdict:
    """Return the verdict on a run: its worst one.

    `missing` is the absence of a value or of the baseline to judge by, `inconclusive` a difference that launches do not settle.
    Warnings and accepted breaches fail nothing.
    """
    verdicts = {"ok" if row.verdict in EXCUSED else row.verdict for row in rows}
    return next((verdict for verdict in ("breach", "missing", "inconclusive", "ok") if verdict in verdicts), "breach")


def gate(run: Run, summaries: Sequence[CellSummary], lookup: BaselineLookup) -> list[GateRow]:
    """Return a row for the state of every cell, then rows for every threshold of the run in its order.

    Numbers are read from launches that ended ok. The state rows cannot be switched off: a cell that failed, or of which
    launches are missing, is a breach whether or not a threshold asks for `status`.
    """
    fields = varying_fields(summary.cell for summary in summaries)
    fitted = lookup.baseline.cells if lookup.baseline else {}
    # A batch that does not fit ends its walk: the batches below it are judged, unless it did fit in the baseline.
    summaries = [summary for summary in summaries if not summary.beyond_memory or summary.cell_id in fitted]
    rows = [_state_row(summary, fields) for summary in summaries]
    selections = [(threshold, _select(threshold, summaries)) for threshold in run.thresholds]
    demands = sum(
        len(selected)
        for threshold, selected in selections
        if "max_regression" in threshold and has_noise(metric_by_name(threshold["metric"]))
    )
    today = datetime.now(UTC).date().isoformat()
    for index, (threshold, selected) in enumerate(selections):
        demanded = [] if selected else [_unmatched_row(run, threshold)]
        for summary in selected:
            demanded += (_excused(row, threshold, today) for row in _demand_rows(threshold, summary, fields, lookup, demands))
        rows += (replace(row, threshold=index) for row in demanded)
    # A threshold that repeats the demand of a state row adds nothing.
    return list(dict.fromkeys(rows))


def _excused(row: GateRow, threshold: Mapping[str, Any], today: str) -> GateRow:
    """Return the row of a demand: a breach may be accepted for a while, or be a warning only. A failed cell is neither."""
    if row.metric == "status" or row.verdict not in ("breach", "missing"):
        return row
    accept = threshold.get("accept") if row.verdict == "breach" else None
    if accept and today <= accept["until"]:
        return replace(row, verdict="accepted", note=f"accepted until {accept['until']}: {accept['reason']}")
    if accept:
        row = replace(row, note=f"it was accepted until {accept['until']}, which has passed: {accept['reason']}")
    return replace(row, verdict="warning") if threshold.get("severity") == "warning" else row


def _select(threshold: Mapping[str, Any], summaries: Sequence[CellSummary]) -> list[CellSummary]:
    where = threshold.get("where") or {}
    return [summary for summary in summaries if all(summary.cell.get(key) == value for key, value in where.items())]


def _state_row(summary: CellSummary, fields: Sequence[str]) -> GateRow:
    actual = summary.status
    verdict: Verdict = "ok" if actual == "ok" else "breach"
    note = None
    if summary.status == MISSING:
        verdict, note = "missing", "it has not run: run the matrix again, finished launches are kept"
    elif summary.status == "ok" and not summary.complete:
        actual, verdict = f"ok in {len(summary.ok)} of {summary.planned} launches", "missing"
        note = "run the matrix again, finished launches are kept"
    elif summary.divergence:
        note = summary.divergence
    elif summary.error:
        note = f"{summary.error['type']}: {summary.error['message']}".splitlines()[0]
    return _row(summary, fields, "status", "ok", actual, verdict, note)


def _unmatched_row(run: Run, threshold: Mapping[str, Any]) -> GateRow:
    where = threshold.get("where") or {}
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
    threshold: Mapping[str, Any], summary: CellSummary, fields: Sequence[str], lookup: BaselineLookup, demands: int
) -> Iterator[GateRow]:
    metric = metric_by_name(threshold["metric"])
    if not metric.is_number:
        expected = str(threshold.get("expect"))
        actual = summary.status if metric.name == "status" else summary.words(metric, summary.records) or MISSING
        if metric.name == "status" and expected == "ok":
            yield _state_row(summary, fields)
        else:
            yield _row(summary, fields, metric.name, expected, actual, "ok" if actual == expected else "breach")
        return
    spread = summary.values[metric.name]
    for text, low, high in _ranges(threshold, metric):
        if spread is None:
            yield _row(summary, fields, metric.name, text, "no value", "missing", _why_no_value(summary))
            continue
        verdict: Verdict = "ok" if low <= spread.value <= high else "breach"
        yield _row(summary, fields, metric.name, text, quantity(spread.value, metric.unit, digits=4), verdict)
    if (allowed := threshold.get("max_regression")) is None:
        return
    if spread is None:
        text = f"within {allowed * 100:g}% of the baseline"
        yield _row(summary, fields, metric.name, text, "no value", "missing", _why_no_value(summary))
        return
    judged = judge_regression(summary, metric, allowed, lookup, demands=max(1, demands))
    yield _row(summary, fields, metric.name, judged.expected, judged.actual, judged.verdict, judged.note)


def _why_no_value(summary: CellSummary) -> str:
    return "no launch could measure it" if summary.ok else "no launch ended ok"


def _ranges(threshold: Mapping[str, Any], metric: Metric) -> Iterator[tuple[str, float, float]]:
    """Yield each absolute demand as text, with the lowest and the highest value that it allows."""

    def number(value: float) -> str:
        return quantity(value, metric.unit, digits=4)

    infinity = float("inf")
    if (expect := threshold.get("expect")) is not None:
        yield f"= {number(expect)}", float(expect), float(expect)
    if (low := threshold.get("min")) is not None:
        yield f">= {number(low)}", low, infinity
    if (high := threshold.get("max")) is not None:
        yield f"<= {number(high)}", -infinity, high


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
