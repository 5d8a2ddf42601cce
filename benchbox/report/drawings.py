"""The charts of a run: throughput, memory, phases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import CellSummary, label
from benchbox.registry.phases import PHASES
from benchbox.report.charts import FULL, BarData, BarPart, Chart, LegendEntry, layout_chart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MEMORY_SOURCES = {
    "torch.cuda": "device memory, by the counters of torch's CUDA allocator",
    "tensor_storage": "bytes of live tensor storage on the host, from a separate untimed step: not device memory",
}

_BYTE_SCALES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COLOURS = 9
NOTICEABLE_WAIT = 0.1  # of a step, for data


def draw_charts(
    summaries: Sequence[CellSummary], axes: Sequence[str], compared: Sequence[str], max_cells: int
) -> tuple[Chart, ...]:
    """Draw every chart that has something to show. Cells that differ only in `compared` form a group, one colour for each.

    Bars of more than `max_cells` cells cannot be read, so there are none.
    """
    if len(summaries) > max_cells:
        return ()
    layout = _Layout(summaries, axes, compared)
    charts = (_throughput(summaries, layout), _memory(summaries, layout), _phases(summaries, layout))
    return tuple(chart for chart in charts if chart is not None)


class _Layout:
    """Group, name and colour of every cell."""

    def __init__(self, summaries: Sequence[CellSummary], axes: Sequence[str], compared: Sequence[str]) -> None:
        self._series = [field for field in compared if field in axes] or list(axes[:1])
        self._context = [field for field in axes if field not in self._series]
        self._names = list(dict.fromkeys(self.name(summary) for summary in summaries))

    def group(self, summary: CellSummary) -> str:
        return label(summary.cell, self._context) if self._context else ""

    def name(self, summary: CellSummary) -> str:
        return label(summary.cell, self._series).removeprefix("backend=")

    def colour(self, summary: CellSummary) -> str:
        return f"s{self._names.index(self.name(summary)) % _COLOURS}"


def _throughput(summaries: Sequence[CellSummary], layout: _Layout) -> Chart | None:
    entries = []
    for summary in summaries:
        spread = summary.values["global_samples_per_s"]
        text = summary.status if spread is None else f"{quantity(spread.value, 'samples/s')}{_flag(summary)}"
        parts = () if spread is None else (BarPart(value=spread.value, colour=layout.colour(summary), title=text),)
        bounds = None if spread is None else (spread.low, spread.high)
        entries.append(BarData(group=layout.group(summary), name=layout.name(summary), parts=parts, spread=bounds, text=text))
    return layout_chart(
        key="throughput",
        title="Throughput (samples/s, more is better)",
        description="Global samples per second of the slowest rank: the median over launches, whiskers from lowest to highest.",
        entries=entries,
        scale=1.0,
    )


def _memory(summaries: Sequence[CellSummary], layout: _Layout) -> Chart | None:
    entries = []
    largest = 0.0
    for summary in summaries:
        allocated, reserved = (summary.values[f"peak_{kind}_bytes"] for kind in ("allocated", "reserved"))
        parts = []
        texts = []
        if allocated is not None:
            texts.append(quantity(allocated.value, "bytes"))
            parts.append(BarPart(value=allocated.value, colour=layout.colour(summary), title=f"allocated {texts[-1]}"))
        if reserved is not None:
            texts.append(quantity(reserved.value, "bytes"))
            parts.append(BarPart(value=reserved.value, colour="rest", title=f"reserved {texts[-1]}"))
        largest = max([largest, *(part.value for part in parts)])
        entries.append(
            BarData(
                group=layout.group(summary),
                name=layout.name(summary),
                parts=tuple(parts),
                spread=None,
                text=" / ".join(texts) + _flag(summary) if texts else summary.status,
                layered=True,
            )
        )
    scale, unit = next(((size, name) for size, name in _BYTE_SCALES if largest >= size), (1, "B"))
    memories = [record["memory"] for summary in summaries for record in summary.ok if record["memory"]]
    sources = list(dict.fromkeys(memory["source"] for memory in memories))
    behind = ": allocated, with reserved in grey behind it" if any(len(entry.parts) == 2 for entry in entries) else ""
    return layout_chart(
        key="memory",
        title=f"Peak memory of the worst rank ({unit}, less is better)",
        description=f"The highest peak of any rank in any launch{behind}.",
        entries=entries,
        scale=float(scale),
        notes=[f"{source}: {MEMORY_SOURCES.get(source, 'an unknown source')}." for source in sources],
    )


def _phases(summaries: Sequence[CellSummary], layout: _Layout) -> Chart | None:
    entries = []
    names: list[str] = []
    for summary in summaries:
        phases, step = summary.phases(), summary.mean_step_s()
        names += [phase for phase in phases if phase not in names]
        parts = [
            BarPart(value=seconds, colour=_phase_colour(phase), title=f"{phase} {quantity(seconds, 's')}")
            for phase, seconds in phases.items()
        ]
        if step is not None and (outside := step - sum(phases.values())) > 0.005 * step:
            parts.append(BarPart(value=outside, colour="rest", title=f"outside the phases {quantity(outside, 's')}"))
        text = summary.status if step is None else f"{quantity(step, 's')}{_flag(summary)}"
        entries.append(
            BarData(group=layout.group(summary), name=layout.name(summary), parts=tuple(parts), spread=None, text=text)
        )
    order = [phase for phase in PHASES if phase in names] + [phase for phase in names if phase not in PHASES]
    return layout_chart(
        key="phases",
        title="Where a step goes (ms)",
        description="Mean time of each phase on the slowest rank, mean over launches; the phases add up to the mean step.",
        entries=entries,
        scale=1e-3,
        width=FULL,
        legend=[LegendEntry(colour=_phase_colour(phase), text=phase) for phase in order],
        notes=_phase_notes(summaries, layout),
    )


def phase_notes(summaries: Sequence[CellSummary], axes: Sequence[str], compared: Sequence[str]) -> tuple[str, ...]:
    """Return what must be read with the times of the phases: which have no time of their own, and which cells wait for data."""
    return _phase_notes(summaries, _Layout(summaries, axes, compared))


def _phase_notes(summaries: Sequence[CellSummary], layout: _Layout) -> tuple[str, ...]:
    fused: dict[str, list[str]] = {}
    waits: dict[str, list[tuple[str, float]]] = {}  # remedy -> (cell, share of the step)
    for summary in summaries:
        for record in summary.ok[:1]:
            for phase, reason in record["fused_phases"].items():
                fused.setdefault(f"{phase} has no time of its own: {reason}", []).append(layout.name(summary))
        if not any("data_wait" in (record["phases_s"] or ()) for record in summary.ok):
            continue
        step, wait = summary.mean_step_s(), summary.phases()["data_wait"]
        if step is not None and wait > NOTICEABLE_WAIT * step:
            waits.setdefault(_wait_remedy(summary.cell["data"]), []).append((layout.name(summary), wait / step))
    return (
        *(f"{', '.join(dict.fromkeys(cells))}: {reason}." for reason, cells in fused.items()),
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


def _phase_colour(phase: str) -> str:
    return f"p{PHASES.index(phase)}" if phase in PHASES else "rest"


def _flag(summary: CellSummary) -> str:
    """Return the note beside a number of a cell in which not every launch ended ok."""
    if summary.complete:
        return ""
    return f" ({len(summary.ok)}/{summary.planned} ok)"
