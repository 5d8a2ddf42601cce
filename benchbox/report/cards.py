"""Cards of a report: everything about one cell, and the command that runs it again."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import label
from benchbox.report.sections import flatten_text
from benchbox.spec.cell import POINT_FIELDS
from benchbox.spec.matrix import to_yaml_word

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchbox.analysis.launches import LaunchTimes
    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import CellDict, LaunchRecord
    from benchbox.report.columns import CellValue, Column
    from benchbox.report.observed import ObservedCell
    from benchbox.store.run import Run

_PLAIN = re.compile(r"[A-Za-z_]([\w./:+-]*\w)?", re.ASCII)
_NO_TEXT = ("true", "false", "null")  # in YAML
_FIELDS = frozenset(field.name for field in POINT_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardGroup:
    """Part of a card. Rows are a name, a text, and a remark beside it."""

    title: str
    rows: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCard:
    """One cell: its values of the axes, the command that runs it, and what is known about it."""

    title: str
    command: str
    groups: tuple[CardGroup, ...]


def cell_cards(
    run: Run,
    summaries: Sequence[CellSummary],
    axes: Sequence[str],
    columns: Sequence[Column],
    rows: Sequence[Sequence[CellValue]],
    observed: Mapping[str, ObservedCell],
) -> tuple[CellCard, ...]:
    """Return one card per cell, in the order of the table.

    Args:
        columns, rows: of the table.
        observed: by cell id.
    """
    searched = {"batch"} if run.walks else set()  # a walk chooses the batches: --only selects the walk
    fields = [axis for axis in axes if axis in _FIELDS - searched]
    return tuple(
        CellCard(
            title=label(summary.cell, axes),
            command=run_command(run, summary.cell, fields),
            groups=tuple(group for group in _groups(summary, axes, columns, row, observed.get(summary.cell_id)) if group.rows),
        )
        for summary, row in zip(summaries, rows, strict=True)
    )


def run_command(run: Run, cell: CellDict, fields: Sequence[str]) -> str:
    """Return the command that runs one cell of a run again, for a POSIX shell."""
    conditions = ", ".join(f"{field}={_only_value(cell.get(field))}" for field in fields)
    selection = ["--only", conditions] if conditions else []
    return shlex.join(["benchbox", "run", run.matrix_file, *selection, *run.options])


def _only_value(value: Any) -> str:
    """Return a value of a cell as `--only` reads it, in quotes where text would be cut at a comma or be no text in YAML."""
    word = to_yaml_word(value)
    is_plain = _PLAIN.fullmatch(word) and word.lower() not in _NO_TEXT
    return word if not isinstance(value, str) or is_plain else "'" + word.replace("'", "''") + "'"


def _groups(
    summary: CellSummary,
    axes: Sequence[str],
    columns: Sequence[Column],
    row: Sequence[CellValue],
    observed: ObservedCell | None,
) -> Iterator[CardGroup]:
    measured = [(column.name, value.line, value.remark) for column, value in zip(columns, row, strict=True)]
    yield CardGroup(title="Measured", rows=tuple(entry for entry in measured if entry[0] not in axes))
    if observed is not None:
        yield CardGroup(
            title="Observed beside requested",
            rows=tuple(
                (entry.name, entry.observed, "" if entry.requested is None else f"asked: {entry.requested}")
                for entry in observed.observations
            ),
        )
    phases = summary.phases if summary.ok else {}
    yield CardGroup(
        title="Phases of a mean step, slowest rank",
        rows=tuple((name, quantity(seconds, "s"), "") for name, seconds in phases.items()),
    )
    evidence = summary.evidence
    if evidence is not None:
        yield CardGroup(title=f"Ranks of launch {evidence['launch']}", rows=tuple(_ranks(evidence, summary.launches.times())))
        yield CardGroup(title="Census, all ranks", rows=tuple(_census(evidence)))
    yield CardGroup(title="Launches", rows=tuple(_launch(record) for record in summary.records))
    yield CardGroup(
        title="Configuration", rows=tuple((name, text, "") for name, text in flatten_text(dict(summary.cell)) if text != "-")
    )


def _ranks(record: LaunchRecord, times: Mapping[int, LaunchTimes]) -> Iterator[tuple[str, str, str]]:
    """Yield the median step and the peak of memory of every rank, as far as they were measured."""
    steps = times[record["launch"]].median_step_s if record["launch"] in times else ()
    peaks = record["memory"]["per_rank"] if record["memory"] else []
    for rank in range(max(len(steps), len(peaks))):
        texts = [f"step {quantity(steps[rank], 's')}"] if rank < len(steps) else []
        if rank < len(peaks):
            texts.append(f"peak allocated {quantity(peaks[rank]['allocated_peak_bytes'], 'bytes')}")
        yield f"rank {rank}", ", ".join(texts), ""


def _census(record: LaunchRecord) -> Iterator[tuple[str, str, str]]:
    """Yield elements and bytes by kind of tensor, with their dtype and device."""
    sizes: dict[tuple[str, str, str], tuple[int, int]] = {}
    for entry in record["precision"]["census"] if record["precision"] else ():
        key = (entry["kind"], entry["dtype"], entry["device"])
        elements, size = sizes.get(key, (0, 0))
        sizes[key] = elements + entry["elements"], size + entry["bytes"]
    for (kind, dtype, device), (elements, size) in sizes.items():
        yield kind, f"{dtype} on {device}: {elements:,} elements", quantity(size, "bytes")


def _launch(record: LaunchRecord) -> tuple[str, str, str]:
    """Return the outcome of a launch, with the error's text, and the file of its record."""
    error, path = record["error"], f"cells/{record['cell_id']}/launch-{record['launch']}.json"
    texts = [str(record["status"])]
    if error is not None:
        texts.append(f"{error['type']}: {error['message']}")
        texts += [error["traceback"]] if error["traceback"] else []
    return f"launch {record['launch']}", "\n".join(texts), path
