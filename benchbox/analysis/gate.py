"""The gate: every demand on every cell it selects, as expected / found / verdict. What did not run is never green."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import MISSING, CellSummary, label, varying
from benchbox.registry.metrics import Metric, metric

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchbox.store.baseline import Baseline
    from benchbox.store.run import Run

Verdict = Literal["ok", "breach", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One demand on one cell. `note` says what to do where the verdict alone does not."""

    cell_id: str | None  # None: the demand selects no cell
    cell: str  # its label
    metric: str
    expected: str
    found: str
    verdict: Verdict
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Reference:
    """The baseline to hold against, or why there is none and what to do about it."""

    baseline: Baseline | None
    remedy: str | None


def gate(run: Run, summaries: Sequence[CellSummary], reference: Reference) -> list[Row]:
    """Rows for the state of every cell, then for every threshold of the run in its order.

    Numbers are read from launches that ended ok. The state rows cannot be switched off: a cell that failed, or of which
    launches are missing, is a breach whether or not a threshold asks for `status`.
    """
    fields = varying(summary.cell for summary in summaries)
    rows = [_state(summary, fields) for summary in summaries]
    for threshold in run.thresholds:
        where = threshold.get("where") or {}
        selected = [summary for summary in summaries if all(summary.cell.get(k) == v for k, v in where.items())]
        if not selected:
            rows.append(_selects_nothing(run, threshold, where))
        for summary in selected:
            rows += _demands(threshold, summary, fields, reference)
    # A threshold that asks for what the state row already says adds nothing.
    return list(dict.fromkeys(rows))


def passes(rows: Sequence[Row]) -> bool:
    return all(row.verdict == "ok" for row in rows)


def _state(summary: CellSummary, fields: Sequence[str]) -> Row:
    found = summary.status
    verdict: Verdict = "ok" if found == "ok" else "breach"
    note = None
    if summary.status == MISSING:
        verdict, note = "missing", "it has not run: run the matrix again, finished launches are kept"
    elif summary.status == "ok" and not summary.whole:
        found, verdict = f"ok in {len(summary.ok)} of {summary.planned} launches", "missing"
        note = "run the matrix again, finished launches are kept"
    elif summary.error:
        note = f"{summary.error['type']}: {summary.error['message']}".splitlines()[0]
    return _row(summary, fields, "status", "ok", found, verdict, note)


def _selects_nothing(run: Run, threshold: Mapping[str, Any], where: Mapping[str, Any]) -> Row:
    skipped = [entry for entry in run.skipped if all(entry["cell"].get(k) == v for k, v in where.items())]
    note = f"every cell it selects was skipped: {skipped[0]['reason']}" if skipped else "no cell of the matrix has these values"
    return Row(
        cell_id=None,
        cell=label(where, where) if where else "every cell",
        metric=threshold["metric"],
        expected="a cell to hold it against",
        found="matches nothing",
        verdict="breach",
        note=note,
    )


def _demands(threshold: Mapping[str, Any], summary: CellSummary, fields: Sequence[str], reference: Reference) -> Iterator[Row]:
    wanted = metric(threshold["metric"])
    if not wanted.is_number:
        expected = str(threshold.get("expect"))
        found = summary.status if wanted.name == "status" else _word(wanted, summary)
        if wanted.name == "status" and expected == "ok":
            yield _state(summary, fields)
        else:
            yield _row(summary, fields, wanted.name, expected, found, "ok" if found == expected else "breach")
        return
    spread = summary.values[wanted.name]

    def number(value: float) -> str:
        return quantity(value, wanted.unit, digits=4)

    for text, holds, remedy in _numeric(threshold, wanted, summary.cell_id, reference):
        if spread is None:
            why = "no launch ended ok" if not summary.ok else "no launch could measure it"
            yield _row(summary, fields, wanted.name, text, "no value", "missing", why)
        elif holds is None:
            yield _row(summary, fields, wanted.name, text, number(spread.value), "missing", remedy)
        else:
            low, high = holds
            verdict: Verdict = "ok" if low <= spread.value <= high else "breach"
            yield _row(summary, fields, wanted.name, text, number(spread.value), verdict)


def _numeric(
    threshold: Mapping[str, Any], wanted: Metric, cell_id: str, reference: Reference
) -> Iterator[tuple[str, tuple[float, float] | None, str | None]]:
    """Each demand as its text and the closed range it allows, or None and the remedy where there is nothing to compare with."""

    def number(value: float) -> str:
        return quantity(value, wanted.unit, digits=4)

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
    if reference.baseline is None:
        yield text, None, reference.remedy
        return
    base = reference.baseline.value(cell_id, wanted.name)
    if base is None:
        yield text, None, "the baseline does not have it: promote a run of today's matrix"
        return
    worse, better = base + allowed * abs(base), base - allowed * abs(base)
    if wanted.direction == "lower":
        yield f"<= {number(worse)} (baseline {number(base)} + {allowed * 100:g}%)", (-infinity, worse), None
    elif wanted.direction == "higher":
        yield f">= {number(better)} (baseline {number(base)} - {allowed * 100:g}%)", (better, infinity), None
    else:
        yield f"{number(better)} .. {number(worse)} (baseline {number(base)} +- {allowed * 100:g}%)", (better, worse), None


def _row(
    summary: CellSummary,
    fields: Sequence[str],
    name: str,
    expected: str,
    found: str,
    verdict: Verdict,
    note: str | None = None,
) -> Row:
    return Row(
        cell_id=summary.cell_id,
        cell=label(summary.cell, fields),
        metric=name,
        expected=expected,
        found=found,
        verdict=verdict,
        note=note,
    )


def _word(wanted: Metric, summary: CellSummary) -> str:
    words = sorted({str(wanted.read(record)) for record in summary.records})
    return ", ".join(words) or MISSING
