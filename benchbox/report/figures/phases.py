"""Time of a step by phase, of every cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import short_label
from benchbox.registry.phases import OUTSIDE_PHASES, PHASES
from benchbox.report.figures.bars import Bar, BarPart, bar_drawing
from benchbox.report.figures.cells import BarNames, launches_note

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchbox.analysis.summary import CellSummary
    from benchbox.report.figures.cells import ReportCells
    from benchbox.report.figures.drawing import Drawing

NOTICEABLE_WAIT = 0.1  # of a step, for data
NOTICEABLE_REMAINDER = 0.005  # of a step, outside the phases


def drawings(cells: ReportCells) -> Iterator[Drawing]:
    """Yield the figure, unless there are too many cells or none ended ok."""
    if cells.are_too_many_for_bars:
        return
    names = BarNames(cells)
    bars = []
    for summary in cells.summaries:
        step = summary.mean_step_s()
        text = summary.status if step is None else f"{quantity(step, 's')}{launches_note(summary)}"
        bars.append(Bar(group=names.group(summary), name=names.name(summary), parts=_parts(summary, step), text=text))
    shown = dict.fromkeys((part.name, part.colour) for bar in bars for part in bar.parts)
    yield from bar_drawing(
        bars,
        key="phases",
        title="Where a step goes (ms)",
        description="Mean time of each phase on the slowest rank, mean over launches; the phases add up to the mean step.",
        is_wide=True,
        legend=sorted(shown, key=lambda entry: PHASES.index(entry[0]) if entry[0] in PHASES else len(PHASES)),
        notes=phase_notes(cells),
    )


def _parts(summary: CellSummary, step: float | None) -> tuple[BarPart, ...]:
    seconds = dict(summary.phases)
    if step is not None and (outside := step - sum(seconds.values())) > NOTICEABLE_REMAINDER * step:
        seconds[OUTSIDE_PHASES] = outside
    return tuple(
        BarPart(phase, 1e3 * value, f"p{PHASES.index(phase)}" if phase in PHASES else "neutral", quantity(value, "s"))
        for phase, value in seconds.items()
    )


def phase_notes(cells: ReportCells) -> tuple[str, ...]:
    """Return what must be read with the times of the phases: which have no time of their own, and which cells wait for data."""
    fused: dict[str, list[str]] = {}  # what has no time of its own -> backends
    waits: dict[str, list[tuple[str, float]]] = {}  # remedy -> (cell, share of the step)
    for summary in cells.summaries:
        for record in summary.ok[:1]:
            for phase, reason in record["fused_phases"].items():
                fused.setdefault(f"{phase} has no time of its own: {reason}", []).append(summary.cell["backend"])
        name = short_label(summary.cell, cells.axes)
        step, wait = summary.mean_step_s(), summary.phases.get("data_wait", 0.0)
        if step is not None and wait > NOTICEABLE_WAIT * step:
            waits.setdefault(_wait_remedy(summary.cell["data"]), []).append((name, wait / step))
    return (
        *(f"{', '.join(dict.fromkeys(backends))}: {reason}." for reason, backends in fused.items()),
        *map(_wait_note, waits, waits.values()),
    )


def _wait_note(remedy: str, waits: Sequence[tuple[str, float]]) -> str:
    """Return a note on the cells that wait for data."""
    names = list(dict.fromkeys(name for name, _ in waits))
    low, high = (f"{bound(share for _, share in waits):.0%}" for bound in (min, max))
    cells = ", ".join(names) if len(names) <= 3 else f"{len(waits)} cells"
    return f"{cells}: data_wait is {low if low == high else f'{low} to {high}'} of a step; {remedy}"


def _wait_remedy(data: Mapping[str, Any]) -> str:
    """Return what to do about waiting for data: the command that finds the number of workers a cell needs."""
    if data["kind"] == "synthetic":
        return "the samples are generated, so a dataset may take less."
    return f"benchbox data bench {data.get('path') or 'DIR'} shows where the time goes and recommends data.workers."
