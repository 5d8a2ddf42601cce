"""The parts of a report beside its table and charts: findings, what went wrong, where, and how."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import UNKNOWN
from benchbox.analysis.summary import CellSummary, label
from benchbox.registry.metrics import METRICS
from benchbox.store.table import flat

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A launch that did not end ok, or a planned cell that has none. `details` may run over lines (a traceback)."""

    cell: str
    status: str
    message: str
    where: str
    details: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """A finding of the precision audit, and the cells it fired in."""

    code: str
    severity: str
    title: str
    where: str
    repair: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a number was made, from the metric's declaration."""

    name: str
    unit: str
    better: str
    formula: str
    launches: str


def findings(summaries: Sequence[CellSummary], axes: Sequence[str]) -> tuple[FindingView, ...]:
    """Findings of all cells; one that fired in several cells is named once, with its cells."""
    found: dict[tuple[str, ...], list[str]] = {}
    for summary in summaries:
        for finding in ((summary.evidence or {}).get("precision") or {}).get("findings") or []:
            key = tuple(str(finding.get(part) or "") for part in ("code", "severity", "title", "where", "repair"))
            found.setdefault(key, []).append(label(summary.cell, axes))
    return tuple(
        FindingView(code=code, severity=severity, title=title, where=where, repair=repair, cells=tuple(dict.fromkeys(cells)))
        for (code, severity, title, where, repair), cells in found.items()
    )


def troubles(summaries: Sequence[CellSummary], axes: Sequence[str]) -> Iterable[Trouble]:
    """Launches that did not end ok, and cells that have not run."""
    for summary in summaries:
        name = label(summary.cell, axes)
        if not summary.records:
            yield Trouble(cell=name, status=summary.status, message="it has not run", where="", details="")
        for record in summary.records:
            if record["status"] == "ok":
                continue
            error = record["error"] or {}
            rank = "" if error.get("rank") is None else f"rank {error['rank']}"
            where = ", ".join(part for part in (f"launch {record['launch']}", rank, error.get("phase")) if part)
            message = f"{error.get('type')}: {error.get('message')}" if error else "no reason was recorded"
            yield Trouble(
                cell=name, status=record["status"], message=message, where=where, details=error.get("traceback") or ""
            )


def environment(summaries: Sequence[CellSummary]) -> tuple[tuple[str, str], ...]:
    """Every value seen in an ok launch; several where launches differ."""
    seen: dict[str, list[str]] = {}
    for summary in summaries:
        for record in summary.ok:
            for key, value in flat_text(record["environment"] or {}):
                values = seen.setdefault(key, [])
                if value not in values:
                    values.append(value)
    return tuple((key, " | ".join(values)) for key, values in seen.items())


def flat_text(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Nested values on one level, as text: `optim.lr`."""
    return tuple(
        (key, UNKNOWN if value is None else value if isinstance(value, str) else json.dumps(value))
        for key, value in flat(values).items()
    )


def method() -> tuple[Method, ...]:
    """Every metric's declaration, in words."""
    better = {"lower": "less is better", "higher": "more is better", "none": "neither way is better"}
    return tuple(
        Method(
            name=metric.name,
            unit=metric.unit,
            better=better[metric.direction],
            formula=metric.formula,
            launches="the worst launch" if metric.launches == "worst" or not metric.is_number else "the median launch",
        )
        for metric in METRICS.values()
    )
