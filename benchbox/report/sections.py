"""The sections of a report on findings, failures, skipped cells and the definitions of metrics."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import UNKNOWN
from benchbox.analysis.summary import CellSummary, label, varying_fields
from benchbox.registry.metrics import metrics
from benchbox.report.cell_lists import CellLists
from benchbox.report.rank_positions import describe_positions
from benchbox.store.table import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchbox.registry.launch_record import CellDict, LaunchRecord

MAX_CELL_LINES = 3  # more cells are listed by what they have in common


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
    cell_list: str  # the cells in short, by what they have in common

    @property
    def cell_lines(self) -> tuple[str, ...]:
        """The cells, one a line; many of them as one short text."""
        return self.cells if len(self.cells) <= MAX_CELL_LINES else (self.cell_list,)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """Definition of a metric, from its declaration."""

    name: str
    unit: str
    better: str
    formula: str
    launches: str


def list_findings(summaries: Sequence[CellSummary], axes: Sequence[str], cell_lists: CellLists) -> tuple[FindingView, ...]:
    """Return the findings of all cells; one that fired in several cells is listed once, with its cells."""
    cells_by_finding: dict[tuple[str, ...], dict[int, str]] = {}  # finding -> position of the cell -> the cell
    for position, summary in enumerate(summaries):
        for finding in summary.precision["findings"] if summary.precision else []:
            parts = (finding["code"], finding["severity"], finding["title"], finding["where"], finding["repair"])
            key = tuple(str(part or "") for part in parts)
            cells_by_finding.setdefault(key, {})[position] = label(summary.cell, axes)
    return tuple(
        FindingView(
            code=code,
            severity=severity,
            title=title,
            where=where,
            repair=repair,
            cells=tuple(cells.values()),
            cell_list=cell_lists.text(cells),
        )
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


def group_failures(
    failures: Sequence[Failure], summaries: Sequence[CellSummary], axes: Sequence[str], cell_lists: CellLists
) -> tuple[Failure, ...]:
    """Return one failure for all launches with equal status and message: their cells in short, without tracebacks."""
    if not failures:
        return ()
    positions = {label(summary.cell, axes): position for position, summary in enumerate(summaries)}
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        groups.setdefault((failure.status, failure.message), []).append(failure)
    return tuple(
        Failure(
            cell=cell_lists.text({positions[failure.cell] for failure in group}),
            status=status,
            message=message,
            where=group[0].where if len(group) == 1 else f"{len(group)} launches",
            details="",
        )
        for (status, message), group in groups.items()
    )


def group_skipped(
    skipped: Sequence[Mapping[str, Any]], cells: Sequence[CellDict], labels: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Return cells in short and the reason, for every reason for which planned cells were skipped.

    Args:
        skipped: as the plan of a run has them.
        cells: that were not skipped.
        labels: of the skipped cells.
    """
    if not skipped:
        return ()
    every = [entry["cell"] for entry in skipped] + [*cells]
    cell_lists = CellLists(every, varying_fields(every))
    positions: dict[str, list[int]] = {}
    for position, entry in enumerate(skipped):
        positions.setdefault(entry["reason"], []).append(position)
    return tuple(
        (labels[members[0]] if len(members) == 1 else cell_lists.text(members), reason) for reason, members in positions.items()
    )


def flatten_text(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return nested values as one level of text with dotted keys, such as `optim.lr`."""
    return tuple(
        (key, UNKNOWN if value is None else value if isinstance(value, str) else _number_text(value))
        for key, value in flatten(values).items()
    )


def _number_text(value: Any) -> str:
    """Return a number or a list as JSON, the most frequent ones in the fastest way."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    return json.dumps(value)


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
