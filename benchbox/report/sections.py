"""The sections of a report beside its table and charts: findings, failures, environment and method."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import UNKNOWN
from benchbox.analysis.summary import CellSummary, label
from benchbox.registry.metrics import metrics
from benchbox.report.rank_positions import describe_positions
from benchbox.store.table import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchbox.registry.launch_record import LaunchRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A launch that did not end ok, or a planned cell without launches.

    `details` may have several lines: a traceback, or of a stuck group `ranks`, the position of every rank.
    """

    cell: str
    status: str
    message: str
    where: str
    details: str
    ranks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """A finding of the precision audit, and the cells in which its rule fired."""

    code: str
    severity: str
    title: str
    where: str
    repair: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """Definition of a metric, from its declaration."""

    name: str
    unit: str
    better: str
    formula: str
    launches: str


def list_findings(summaries: Sequence[CellSummary], axes: Sequence[str]) -> tuple[FindingView, ...]:
    """Return the findings of all cells; one that fired in several cells is listed once, with its cells."""
    cells_by_finding: dict[tuple[str, ...], list[str]] = {}
    for summary in summaries:
        for finding in summary.precision["findings"] if summary.precision else []:
            parts = (finding["code"], finding["severity"], finding["title"], finding["where"], finding["repair"])
            key = tuple(str(part or "") for part in parts)
            cells_by_finding.setdefault(key, []).append(label(summary.cell, axes))
    return tuple(
        FindingView(code=code, severity=severity, title=title, where=where, repair=repair, cells=tuple(dict.fromkeys(cells)))
        for (code, severity, title, where, repair), cells in cells_by_finding.items()
    )


def list_failures(summaries: Sequence[CellSummary], axes: Sequence[str]) -> Iterable[Failure]:
    """Yield the launches that did not end ok, and the cells that have not run."""
    for summary in summaries:
        cell = label(summary.cell, axes)
        if not summary.records:
            yield Failure(cell=cell, status=summary.status, message="it has not run", where="", details="")
        for record in summary.records:
            if record["status"] != "ok":
                yield _failure(record, cell)


def _failure(record: LaunchRecord, cell: str) -> Failure:
    error, launch = record["error"], f"launch {record['launch']}"
    if error is None:
        return Failure(cell=cell, status=record["status"], message="no reason was recorded", where=launch, details="")
    rank = "" if error["rank"] is None else f"rank {error['rank']}"
    unchecked = f" ({reason})" if (reason := record.get("unchecked_reason")) else ""
    ranks = describe_positions(error.get("ranks") or ())
    return Failure(
        cell=cell,
        status=record["status"],
        message=f"{error['type']}: {error['message']}{unchecked}",
        where=", ".join(part for part in (launch, rank, error["phase"]) if part),
        details=ranks or error["traceback"] or "",  # which has the stacks of the ranks as well
        ranks=ranks,
    )


def list_environment(summaries: Sequence[CellSummary]) -> tuple[tuple[str, str], ...]:
    """Return the environment of all ok launches by key; several values where launches differ."""
    values_by_key: dict[str, list[str]] = {}
    for summary in summaries:
        for record in summary.ok:
            for key, value in flatten_text(record["environment"] or {}):
                values = values_by_key.setdefault(key, [])
                if value not in values:
                    values.append(value)
    return tuple((key, " | ".join(values)) for key, values in values_by_key.items())


def flatten_text(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return nested values as one level of text with dotted keys, such as `optim.lr`."""
    return tuple(
        (key, UNKNOWN if value is None else value if isinstance(value, str) else json.dumps(value))
        for key, value in flatten(values).items()
    )


def list_methods() -> tuple[MethodRow, ...]:
    """Return the definition of every metric in words."""
    better = {"lower": "less is better", "higher": "more is better", "none": "neither way is better"}
    return tuple(
        MethodRow(
            name=metric.name,
            unit=metric.unit,
            better=better[metric.direction],
            formula=metric.formula,
            launches="the worst launch" if metric.launches == "worst" or not metric.is_number else "the median launch",
        )
        for metric in metrics().values()
    )
