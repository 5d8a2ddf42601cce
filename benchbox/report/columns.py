"""The columns of the comparison table, independent of the format in which a report is rendered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.adam_state import adam_dtypes
from benchbox.analysis.partial_steps import partial_steps
from benchbox.analysis.quantities import UNKNOWN, counted, quantity
from benchbox.analysis.reconciliation import COMMUNICATION, PEAK_MEMORY, STEP_TIME, reconcile
from benchbox.analysis.step_bounds import NO_BOUNDS, StepBounds
from benchbox.analysis.summary import CellSummary, matrix_text
from benchbox.registry.metrics import BUILT_IN_METRICS, Metric, metrics
from benchbox.report.headline import evidence_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from benchbox.analysis.comparability import Comparison
    from benchbox.store.predictions import CellPrediction


@dataclass(frozen=True, slots=True)
class CellValue:
    """Content of a table cell: its text, the value it sorts by, a remark shown on request, and a detail beside the text."""

    text: str
    sort: float | str = ""
    remark: str = ""
    detail: str = ""

    @property
    def line(self) -> str:
        """Text and detail in one line."""
        return f"{self.text} ({self.detail})" if self.detail else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table. `brief` columns are shown on a terminal, where there is little room."""

    name: str
    remark: str
    number: bool
    brief: bool
    read: Callable[[CellSummary, Comparison | None], CellValue]


def _metric_column(metric: Metric, *, name: str | None = None, brief: bool = True, ranged: bool = False) -> Column:
    """Return the column of a numeric metric. With `ranged`, the range over launches is shown beside the value."""

    def read(summary: CellSummary, _: Comparison | None) -> CellValue:
        spread = summary.values[metric.name]
        if spread is None:
            return CellValue(UNKNOWN, -1.0)
        text = quantity(spread.value, metric.unit).removesuffix(" samples/s")
        low, high = (quantity(bound, metric.unit).removesuffix(" samples/s") for bound in (spread.low, spread.high))
        remark = f"{low} to {high} over {spread.launches} launches" if spread.launches > 1 else "one launch"
        detail = _range(low, high) if ranged and low != high else ""
        return CellValue(text, spread.value, remark, detail)

    return Column(name=name or metric.name, remark=metric.formula, number=True, brief=brief, read=read)


def _word_column(metric: Metric) -> Column:
    def read(summary: CellSummary, _: Comparison | None) -> CellValue:
        words = summary.words(metric, summary.ok) or UNKNOWN
        return CellValue(words, words)

    return Column(name=metric.name, remark=metric.formula, number=False, brief=False, read=read)


def _range(low: str, high: str) -> str:
    """Return `203..210`, with units only when they differ."""
    (low_number, _, low_unit), (high_number, _, high_unit) = low.partition(" "), high.partition(" ")
    return f"{low_number}..{high_number}" if low_unit == high_unit else f"{low}..{high}"


def _ratio(_: CellSummary, comparison: Comparison | None) -> CellValue:
    if comparison is None:
        return CellValue("reference", 1.0, "what the others are compared with")
    if comparison.ratio is None:
        return CellValue(UNKNOWN, -1.0, comparison.reason or "")
    text = f"{comparison.ratio:.2f}x" + ("" if comparison.is_settled else " ~")
    return CellValue(text, comparison.ratio, evidence_of(comparison))


def _kernel(summary: CellSummary, _: Comparison | None) -> CellValue:
    kernel = summary.observed["attention_kernel"] if summary.observed else None
    return CellValue(str(kernel or UNKNOWN), str(kernel))


def _adam(summary: CellSummary, _: Comparison | None) -> CellValue:
    dtypes = adam_dtypes(summary.evidence) if summary.evidence else ()
    return CellValue(", ".join(dtypes) or UNKNOWN, " ".join(dtypes))


def _findings(summary: CellSummary, _: Comparison | None) -> CellValue:
    precision = summary.precision
    if not precision:
        return CellValue(UNKNOWN, "", "the precision audit has no census of this cell")
    if problems := precision.get("problems"):
        return CellValue("observer failed", "", "; ".join(problems))
    findings = precision["findings"]
    shown = [finding for finding in findings if finding["severity"] != "info"]  # the section on findings has the others
    codes = list(dict.fromkeys(f"{finding['code']} {finding['severity']}" for finding in shown))
    titles = dict.fromkeys(finding["title"] for finding in findings)
    notes = len({finding["code"] for finding in findings if finding["severity"] == "info"})
    noted = counted(notes, "note") if notes else "none"
    return CellValue(", ".join(codes) or noted, len(codes), "; ".join(titles))


def _status(summary: CellSummary, _: Comparison | None) -> CellValue:
    text = "incomplete" if summary.status == "ok" and not summary.complete else summary.status
    ok, planned = len(summary.ok), summary.planned
    if summary.beyond_memory:
        return CellValue(text, text, "a smaller batch of the same walk fits", "beyond memory")
    count = [] if summary.complete or not summary.records else [f"{ok}/{planned} ok"]
    busy = [f"launch {launch}: {reason}" for launch, reasons in summary.busy_reasons.items() for reason in reasons]
    partial = [f"launch {record['launch']}: {reason}" for record in summary.ok for reason in partial_steps(record)]
    causes = "; ".join([f"{ok} of {planned} launches ok", *busy, *partial])
    return CellValue(text, text, causes, ", ".join([*count, *summary.marks]))


_RATIO = Column(name="vs reference", remark="global samples/s over the reference's", number=True, brief=True, read=_ratio)
_RESERVED = _metric_column(BUILT_IN_METRICS["peak_reserved_bytes"], name="peak reserved", brief=False)
_UTILISATION = (
    _metric_column(BUILT_IN_METRICS["mfu"], name="MFU"),
    _metric_column(BUILT_IN_METRICS["hfu"], name="HFU", brief=False),
)
_NUMERICS = (
    _metric_column(BUILT_IN_METRICS["edq"], name="EDQ"),
    _metric_column(BUILT_IN_METRICS["updates_lost"], name="updates lost"),
    _metric_column(BUILT_IN_METRICS["second_moment_stalled"], name="v stalled", brief=False),
    _metric_column(BUILT_IN_METRICS["final_loss"], name="final loss"),
)
_COLUMNS = (
    Column(name="status", remark="the worst over launches", number=False, brief=True, read=_status),
    _metric_column(BUILT_IN_METRICS["global_samples_per_s"], name="samples/s"),
    _RATIO,
    _metric_column(BUILT_IN_METRICS["step_time_s"], name="step", ranged=True),
    _metric_column(BUILT_IN_METRICS["peak_allocated_bytes"], name="peak allocated"),
    _RESERVED,
    *_UTILISATION,
    *_NUMERICS,
    Column(name="attention kernel", remark="the kernel that ran, observed", number=False, brief=False, read=_kernel),
    Column(name="Adam state", remark="dtypes of Adam's moments, from the census", number=False, brief=False, read=_adam),
    Column(name="findings", remark="of the precision audit", number=False, brief=False, read=_findings),
)


def columns(
    axes: Sequence[str],
    summaries: Sequence[CellSummary],
    *,
    compared: bool,
    predictions: Mapping[str, CellPrediction] | None = None,
    bounds: StepBounds = NO_BOUNDS,
) -> tuple[Column, ...]:
    """Return the columns of a run: one for every axis that varies, then the measurements that this run can have.

    An axis that moves together with an earlier one adds no information, so its column is not brief. The columns about lost
    updates appear where recipes are compared, those of theory where cells have predictions. Metrics of other
    packages come last, if a launch has a value.
    """
    omitted = [] if compared else [_RATIO]
    if all(summary.values["peak_reserved_bytes"] is None for summary in summaries):
        omitted.append(_RESERVED)
    if all(summary.values["mfu"] is None for summary in summaries):
        omitted += _UTILISATION
    if "recipe" not in axes:
        omitted += _NUMERICS
    patterns: list[list[str]] = []
    fields = []
    for field in axes:
        pattern = _pattern(matrix_text(summary.cell.get(field)) for summary in summaries)
        fields.append(_axis(field, brief=pattern not in patterns))
        patterns.append(pattern)
    measured = (column for column in _COLUMNS if column not in omitted)
    return (
        *fields,
        *measured,
        *(_prediction_columns(predictions, bounds) if predictions else ()),
        *_added_columns(summaries),
    )


def _prediction_columns(predictions: Mapping[str, CellPrediction], bounds: StepBounds) -> tuple[Column, ...]:
    """Return the predicted memory, communication and, with bounds, time of a step, each with its error and verdict."""

    def column(name: str, remark: str, quantity_name: str) -> Column:
        def read(summary: CellSummary, _: Comparison | None) -> CellValue:
            prediction = predictions.get(summary.cell_id)
            if prediction is None:
                return CellValue(UNKNOWN, -1.0, "nothing was predicted for this cell")
            entries = reconcile(prediction, summary, bounds.by_cell.get(summary.cell_id))
            entry = next((entry for entry in entries if entry.quantity == quantity_name), None)
            if entry is None:
                return CellValue(UNKNOWN, -1.0, bounds.reasons.get(summary.cell_id, ""))
            error = "" if entry.error is None else f"{entry.error:+.1%}, "
            return CellValue(quantity(entry.predicted, entry.unit), entry.predicted, entry.residual, error + entry.verdict)

        return Column(name=name, remark=remark, number=True, brief=False, read=read)

    peak = column("predicted peak", "peak memory by theory, and its error", PEAK_MEMORY)
    communication = column(
        "predicted communication", "bytes of the collectives of a step and rank by theory, and their error", COMMUNICATION
    )
    step = column("predicted step", "least time of a step by theory, and the distance to it", STEP_TIME)
    return (peak, communication, step) if bounds.by_cell else (peak, communication)


def _added_columns(summaries: Sequence[CellSummary]) -> tuple[Column, ...]:
    """Return the columns of the metrics that other packages added and that any launch has a value of."""
    added = [metric for name, metric in metrics().items() if name not in BUILT_IN_METRICS]
    numbers = [metric for metric in added if metric.is_number and any(summary.values[metric.name] for summary in summaries)]
    words = [metric for metric in added if not metric.is_number]
    return (*(_metric_column(metric, brief=False) for metric in numbers), *(_word_column(metric) for metric in words))


def _pattern(values: Iterable[str]) -> list[str]:
    """Return values as numbers in the order of their appearance: equal for fields that move together."""
    numbers: dict[str, str] = {}
    return [numbers.setdefault(value, str(len(numbers))) for value in values]


def _axis(field: str, *, brief: bool) -> Column:
    def read(summary: CellSummary, _: Comparison | None) -> CellValue:
        value = summary.cell.get(field)
        return CellValue(matrix_text(value), value if isinstance(value, (int, float)) else matrix_text(value))

    return Column(name=field, remark="", number=False, brief=brief, read=read)


def table_rows(
    columns: Sequence[Column], summaries: Sequence[CellSummary], comparisons: Mapping[str, Comparison]
) -> tuple[tuple[CellValue, ...], ...]:
    """Return one row per cell."""
    return tuple(tuple(column.read(summary, comparisons.get(summary.cell_id)) for column in columns) for summary in summaries)
