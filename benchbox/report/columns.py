"""The columns of the comparison table: a column is an entry here, whatever the report is rendered as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.comparability import Comparison, adam_dtypes
from benchbox.analysis.quantities import UNKNOWN, quantity
from benchbox.analysis.summary import CellSummary, plain
from benchbox.registry.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Value:
    """A table cell: what it says, what it sorts by, a remark for who looks closer, and a detail that belongs to the text."""

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
    """`brief` columns are those of the terminal, where there is little room."""

    name: str
    remark: str
    number: bool
    brief: bool
    read: Callable[[CellSummary, Comparison | None], Value]


def _metric(name: str, *, ranged: bool = False) -> Callable[[CellSummary, Comparison | None], Value]:
    metric = METRICS[name]

    def read(summary: CellSummary, _: Comparison | None) -> Value:
        spread = summary.values[name]
        if spread is None:
            return Value(UNKNOWN, -1.0)
        text = quantity(spread.value, metric.unit).removesuffix(" samples/s")
        low, high = (quantity(bound, metric.unit).removesuffix(" samples/s") for bound in (spread.low, spread.high))
        remark = f"{low} to {high} over {spread.launches} launches" if spread.launches > 1 else "one launch"
        detail = _range(low, high) if ranged and low != high else ""
        return Value(text, spread.value, remark, detail)

    return read


def _range(low: str, high: str) -> str:
    """`203..210`, with units only when they are not the same."""
    (number, _, unit), (other, _, other_unit) = low.partition(" "), high.partition(" ")
    return f"{number}..{other}" if unit == other_unit else f"{low}..{high}"


def _ratio(_: CellSummary, comparison: Comparison | None) -> Value:
    if comparison is None:
        return Value("reference", 1.0, "what the others are compared with")
    if comparison.ratio is None:
        return Value(UNKNOWN, -1.0, comparison.reason or "")
    text = f"{comparison.ratio:.2f}x"
    if comparison.apart is None:
        return Value(text, comparison.ratio, "of a single launch on one side: the spread is unknown")
    if not comparison.apart:
        return Value(f"{text} ~", comparison.ratio, "ranges over launches overlap: no difference is shown")
    return Value(text, comparison.ratio, "ranges over launches do not overlap")


def _kernel(summary: CellSummary, _: Comparison | None) -> Value:
    observed = (summary.evidence or {}).get("observed") or {}
    return Value(str(observed.get("attention_kernel") or UNKNOWN), str(observed.get("attention_kernel")))


def _adam(summary: CellSummary, _: Comparison | None) -> Value:
    dtypes = adam_dtypes(summary.evidence) if summary.evidence else ()
    return Value(", ".join(dtypes) or UNKNOWN, " ".join(dtypes))


def _findings(summary: CellSummary, _: Comparison | None) -> Value:
    precision = (summary.evidence or {}).get("precision")
    if not precision:
        return Value(UNKNOWN, "", "the precision audit has no census of this cell")
    if problems := precision.get("problems"):
        return Value("witness failed", "", "; ".join(problems))
    found = precision["findings"]
    told = [finding for finding in found if finding["severity"] != "info"]  # notes stand in the section on findings
    codes = list(dict.fromkeys(f"{finding['code']} {finding['severity']}" for finding in told))
    return Value(", ".join(codes) or "none", len(codes), "; ".join(dict.fromkeys(finding["title"] for finding in found)))


def _status(summary: CellSummary, _: Comparison | None) -> Value:
    text = "incomplete" if summary.status == "ok" and not summary.whole else summary.status
    ok, planned = len(summary.ok), summary.planned
    return Value(
        text, text, f"{ok} of {planned} launches ok", "" if summary.whole or not summary.records else f"{ok}/{planned} ok"
    )


_RATIO = Column(name="vs reference", remark="global samples/s over the reference's", number=True, brief=True, read=_ratio)
_RESERVED = Column(
    name="peak reserved",
    remark=METRICS["peak_reserved_bytes"].formula,
    number=True,
    brief=False,
    read=_metric("peak_reserved_bytes"),
)
_UTILISATION = tuple(
    Column(name=name.upper(), remark=METRICS[name].formula, number=True, brief=name == "mfu", read=_metric(name))
    for name in ("mfu", "hfu")
)
_NUMERICS = tuple(
    Column(name=name, remark=METRICS[metric].formula, number=True, brief=brief, read=_metric(metric))
    for name, metric, brief in (
        ("EDQ", "edq", True),
        ("updates lost", "updates_lost", True),
        ("v stalled", "second_moment_stalled", False),
        ("final loss", "final_loss", True),
    )
)
_COLUMNS = (
    Column(name="status", remark="the worst over launches", number=False, brief=True, read=_status),
    Column(
        name="samples/s",
        remark=METRICS["global_samples_per_s"].formula,
        number=True,
        brief=True,
        read=_metric("global_samples_per_s"),
    ),
    _RATIO,
    Column(
        name="step", remark=METRICS["step_time_s"].formula, number=True, brief=True, read=_metric("step_time_s", ranged=True)
    ),
    Column(
        name="peak allocated",
        remark=METRICS["peak_allocated_bytes"].formula,
        number=True,
        brief=True,
        read=_metric("peak_allocated_bytes"),
    ),
    _RESERVED,
    *_UTILISATION,
    *_NUMERICS,
    Column(name="attention kernel", remark="the kernel that ran, observed", number=False, brief=False, read=_kernel),
    Column(name="Adam state", remark="dtypes of Adam's moments, from the census", number=False, brief=False, read=_adam),
    Column(name="findings", remark="of the precision audit", number=False, brief=False, read=_findings),
)


def columns(axes: Sequence[str], summaries: Sequence[CellSummary], *, compared: bool) -> tuple[Column, ...]:
    """The columns of a run: one for every axis that varies, then the measurements that this run can have.

    An axis that moves together with an earlier one tells nothing new, and is left to who has room for it. What steps did to
    weights is told where recipes are compared.
    """
    left_out = [] if compared else [_RATIO]
    if all(summary.values["peak_reserved_bytes"] is None for summary in summaries):
        left_out.append(_RESERVED)
    if all(summary.values["mfu"] is None for summary in summaries):
        left_out += _UTILISATION
    if "recipe" not in axes:
        left_out += _NUMERICS
    told: list[list[str]] = []  # what each axis so far says of every cell, as a pattern
    fields = []
    for field in axes:
        pattern = _pattern(plain(summary.cell.get(field)) for summary in summaries)
        fields.append(_axis(field, brief=pattern not in told))
        told.append(pattern)
    return (*fields, *(column for column in _COLUMNS if column not in left_out))


def _pattern(values: Iterable[str]) -> list[str]:
    """Values as numbers in the order of their appearance: equal for fields that move together."""
    seen: dict[str, str] = {}
    return [seen.setdefault(value, str(len(seen))) for value in values]


def _axis(field: str, *, brief: bool) -> Column:
    def read(summary: CellSummary, _: Comparison | None) -> Value:
        value = summary.cell.get(field)
        return Value(plain(value), value if isinstance(value, (int, float)) else plain(value))

    return Column(name=field, remark="", number=False, brief=brief, read=read)


def table_rows(
    columns: Sequence[Column], summaries: Sequence[CellSummary], comparisons: Mapping[str, Comparison]
) -> tuple[tuple[Value, ...], ...]:
    """One row a cell."""
    return tuple(tuple(column.read(summary, comparisons.get(summary.cell_id)) for column in columns) for summary in summaries)
