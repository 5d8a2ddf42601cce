"""The gate: each demand on each selected cell, with the expected and the actual value. A cell that did not run never passes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from benchbox.analysis.baseline_walks import baseline_walks, resolved_point
from benchbox.analysis.best_batches import repeats
from benchbox.analysis.certificates import ENDED, LARGEST_BATCH, Certificate, certificates
from benchbox.analysis.quantities import counted, quantity
from benchbox.analysis.regression import has_noise, judge_fastest_batch, judge_regression
from benchbox.analysis.run_environments import memory_limit_difference
from benchbox.analysis.summary import MISSING, CellSummary, label, varying_fields
from benchbox.registry.metrics import Metric, metric_by_name
from benchbox.spec.cell import Cell
from benchbox.spec.threshold import FASTEST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchbox.analysis.regression import BaselineLookup, DemandVerdict, RegressionJudgement
    from benchbox.store.baseline import Baseline
    from benchbox.store.run import Run

    _Judge = Callable[[CellSummary, Metric, float], RegressionJudgement]

GateVerdict = Literal["ok", "inconclusive", "missing", "breach", "warning", "accepted"]
EXCUSED = ("warning", "accepted")  # verdicts on breaches that fail nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """One demand on one cell. `note` says what to do where the verdict alone does not."""

    cell_id: str | None  # None: the row is about no single cell
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


def verdict_of(rows: Sequence[GateRow]) -> DemandVerdict:
    """Return the verdict on a run: its worst one.

    `missing` is the absence of a value or of the baseline to judge by, `inconclusive` a difference that launches do not settle.
    Warnings and accepted breaches fail nothing.
    """
    verdicts = {"ok" if row.verdict in EXCUSED else row.verdict for row in rows}
    return next((verdict for verdict in ("breach", "missing", "inconclusive", "ok") if verdict in verdicts), "breach")


def gate(run: Run, summaries: Sequence[CellSummary], lookup: BaselineLookup) -> list[GateRow]:
    """Return a row for the state of every cell, then rows for every threshold of the run in its order.

    Numbers are read from launches that ended ok. The state rows cannot be switched off: a cell that failed, or of which
    launches are missing, never passes whether or not a threshold asks for `status`, nor does a walk that has not ended.
    Beside a baseline, neither does a walk whose largest batch has become smaller, or a cell that is skipped now.
    """
    fields = varying_fields(summary.cell for summary in summaries)
    results, baseline = certificates(run, summaries), lookup.baseline
    # A batch that does not fit ends its walk: the batches below it are judged.
    summaries = [summary for summary in summaries if not summary.beyond_memory]
    rows = [_state_row(summary, fields) for summary in summaries]
    is_related = baseline is not None and (run.walks or baseline.cells.keys() - run.cells.keys())
    walks = baseline_walks(baseline) if baseline is not None and is_related else {}
    rows += _walk_rows(run, results, fields, baseline, walks)
    if baseline is not None and walks:
        rows += _absent_rows(run, baseline, walks)
    selections = [(threshold, _select(threshold, summaries, results)) for threshold in run.thresholds]
    demands = sum(
        len(selected)
        for threshold, selected in selections
        if "max_regression" in threshold and has_noise(metric_by_name(threshold["metric"]))
    )
    judge = partial(judge_regression, lookup=lookup, demands=max(1, demands))
    judge_batch = partial(judge_regression, lookup=lookup, demands=max(1, demands), of_walk=True)
    judge_fastest = partial(judge_fastest_batch, lookup=lookup, demands=max(1, demands), walks=walks, measure=run.measure)
    searched = {summary.cell_id: result for result in results for summary in result.batches}
    today = datetime.now(UTC).date().isoformat()
    for index, (threshold, selected) in enumerate(selections):
        demanded = [] if selected else [_unmatched_row(run, threshold)]
        for subject in selected:
            if isinstance(subject, Certificate):
                added = _fastest_batch_rows(threshold, subject, fields, judge_fastest)
            elif walk := searched.get(subject.cell_id):
                added = _batch_rows(threshold, subject, walk, fields, judge_batch)
            else:
                added = _demand_rows(threshold, subject, fields, judge)
            demanded += (_excused(row, threshold, today) for row in added)
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


def _select(
    threshold: Mapping[str, Any], summaries: Sequence[CellSummary], results: Sequence[Certificate]
) -> Sequence[CellSummary | Certificate]:
    """Return the cells that a threshold selects, or of `batch: fastest` the walks."""
    where = dict(threshold.get("where") or {})
    if where.get("batch") != FASTEST:
        return [summary for summary in summaries if where.items() <= summary.cell.items()]
    del where["batch"]
    return [result for result in results if where.items() <= result.batches[0].cell.items()]


def _state_row(summary: CellSummary, fields: Sequence[str]) -> GateRow:
    actual = summary.status
    verdict: DemandVerdict = "ok" if actual == "ok" else "breach"
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


def _walk_rows(
    run: Run,
    results: Sequence[Certificate],
    fields: Sequence[str],
    baseline: Baseline | None,
    walks: Mapping[str, Mapping[int, str]],
) -> Iterator[GateRow]:
    """Yield a row for every walk that does not show what fits, and for each of the baseline: its largest batch may not fall."""
    limits = memory_limit_difference(run.measure, baseline.measure) if baseline is not None else None
    others = [field for field in fields if field != "batch"]
    for walk, result in zip(run.walks, results, strict=True):
        subject, batches = result.largest or result.batches[0], walks.get(resolved_point(result.batches[0].cell)) or {}
        if baseline is not None and all(baseline.is_of_walk(cell_id) is False for cell_id in batches.values()):
            batches = {}
        actual = "none" if result.largest is None else str(subject.cell["batch"])
        expected, note = "a walk that has ended", result.reason
        verdict: GateVerdict = "ok"
        if batches:
            demanded, expected = _demanded_batch(max(batches), walk["at_most"])
            verdict = "ok" if result.largest is not None and subject.cell["batch"] >= demanded else "breach"
        if not result.is_conclusive:
            actual, verdict = f"{actual} so far" if result.outcome == "unfinished" else actual, "missing"
        elif batches and limits is not None:
            verdict, note = "warning", f"not compared: {limits} of the baseline; promote a run of today's limit"
        elif verdict == "ok":
            note = None
        if batches or verdict != "ok":
            yield _row(subject, others, LARGEST_BATCH, expected, actual, verdict, note)


def _demanded_batch(largest: int, at_most: int | None) -> tuple[int, str]:
    """Return the batch that must fit, and in words why: the largest of the baseline, as far as the walk may try it."""
    if at_most is None or largest <= at_most:
        return largest, f">= {largest} (baseline)"
    return at_most, f">= {at_most} (at_most; baseline {largest})"


def _absent_rows(run: Run, baseline: Baseline, walks: Mapping[str, Mapping[int, str]]) -> Iterator[GateRow]:
    """Yield a row for everything that is skipped and was measured in the baseline, and one for all that left the matrix.

    Other batches of a walk that is planned are not absent: a walk need not try the same ones again.
    """
    planned = {resolved_point(run.cells[walk["cells"][0]]) for walk in run.walks}
    remaining = [batches for point, batches in walks.items() if point not in planned]
    absent = {cell_id for batches in remaining for cell_id in batches.values()} - run.cells.keys()
    is_searched = isinstance((run.matrix.get("axes") or {}).get("batch"), dict)
    for entry in run.skipped:
        cell = entry["cell"]
        cell_id = Cell.from_dict(dict(cell)).cell_id
        measured = absent & ({*walks.get(resolved_point(cell), {}).values()} if is_searched else {cell_id})
        if not measured:
            continue
        absent -= measured
        fields = [field for field in varying_fields([*run.cells.values(), cell]) if not (is_searched and field == "batch")]
        yield GateRow(
            cell_id=cell_id,
            cell=label(cell, fields),
            metric="status",
            expected="ok (baseline)",
            actual="skipped",
            verdict="breach",
            note=f"it was measured in the baseline, and is skipped now: {entry['reason']}",
        )
    if absent:
        cells = [entry["cell"] for cell_id, entry in baseline.cells.items() if cell_id in absent]
        example = label(cells[0], varying_fields([*run.cells.values(), *cells]))
        yield GateRow(
            cell_id=None,
            cell=f"{counted(len(cells), 'cell')} of the baseline",
            metric="status",
            expected="in the matrix",
            actual="not in the matrix",
            verdict="warning",
            note=f"nothing is compared with what the matrix has no more, such as {example}: promote a new baseline",
        )


def _unmatched_row(run: Run, threshold: Mapping[str, Any]) -> GateRow:
    where = threshold.get("where") or {}
    is_fastest = where.get("batch") == FASTEST
    values = {key: value for key, value in where.items() if not (is_fastest and key == "batch")}
    skipped = [entry for entry in run.skipped if values.items() <= entry["cell"].items()]
    note = "no cell of the matrix has these values"
    if is_fastest and not run.walks:
        note = f"batch: {FASTEST} selects walks, and this run has none"
    elif skipped:
        note = f"every cell it selects was skipped: {skipped[0]['reason']}"
    return GateRow(
        cell_id=None,
        cell=label(where, where) if where else "every cell",
        metric=threshold["metric"],
        expected="a cell that matches",
        actual="matches nothing",
        verdict="breach",
        note=note,
    )


def _fastest_batch_rows(
    threshold: Mapping[str, Any], result: Certificate, fields: Sequence[str], judge: _Judge
) -> Iterator[GateRow]:
    metric = metric_by_name(threshold["metric"])
    if result.fastest is None or result.outcome not in ENDED:
        yield _row(result.batches[0], fields, metric.name, "a walk that has ended", result.outcome, "missing", result.reason)
        return
    yield from _demand_rows(threshold, _judged(result.fastest, metric), fields, judge)


def _batch_rows(
    threshold: Mapping[str, Any], summary: CellSummary, walk: Certificate, fields: Sequence[str], judge: _Judge
) -> Iterator[GateRow]:
    for row in _demand_rows(threshold, _judged(summary, metric_by_name(threshold["metric"])), fields, judge):
        yield _with_remedy(row, walk)


def _judged(summary: CellSummary, metric: Metric) -> CellSummary:
    """Return a batch of a walk by the launches that are judged: without the one that searched, where chance may have chosen."""
    return repeats(summary) if has_noise(metric) else summary


def _with_remedy(row: GateRow, walk: Certificate) -> GateRow:
    """Return a row on a batch of a walk; of one that launches cannot settle because none repeat it, with what can be asked."""
    if row.verdict != "inconclusive" or walk.fastest is None or row.cell_id == walk.fastest.cell_id:
        return row
    batch = walk.fastest.cell["batch"]
    return replace(
        row, note=f"launches repeat the fastest batch of a walk only, {batch}: `where: {{batch: {FASTEST}}}` judges it"
    )


def _demand_rows(threshold: Mapping[str, Any], summary: CellSummary, fields: Sequence[str], judge: _Judge) -> Iterator[GateRow]:
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
        verdict: DemandVerdict = "ok" if low <= spread.value <= high else "breach"
        yield _row(summary, fields, metric.name, text, quantity(spread.value, metric.unit, digits=4), verdict)
    if (allowed := threshold.get("max_regression")) is None:
        return
    if spread is None:
        text = f"within {allowed * 100:g}% of the baseline"
        yield _row(summary, fields, metric.name, text, "no value", "missing", _why_no_value(summary))
        return
    judged = judge(summary, metric, allowed)
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
    verdict: GateVerdict,
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
