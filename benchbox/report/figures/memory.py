"""Peak memory of every cell: allocated, and reserved behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.quantities import quantity
from benchbox.report.figures.bars import Bar, BarPart, bar_drawing
from benchbox.report.figures.cells import BarNames, launches_note
from benchbox.report.figures.drawing import byte_scale

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.analysis.summary import CellSummary
    from benchbox.report.figures.cells import ReportCells
    from benchbox.report.figures.drawing import Drawing

_SOURCES = {
    "torch.cuda": "device memory, by the counters of torch's CUDA allocator",
    "tensor_storage": "bytes of live tensor storage on the host, from a separate untimed step: not device memory",
}


def drawings(cells: ReportCells) -> Iterator[Drawing]:
    """Yield the figure, unless there are too many cells or none ended ok."""
    if cells.are_too_many_for_bars:
        return
    names = BarNames(cells)
    peaks = [
        {kind: spread.value for kind in ("allocated", "reserved") if (spread := summary.values[f"peak_{kind}_bytes"])}
        for summary in cells.summaries
    ]
    scale, unit = byte_scale(max((value for kinds in peaks for value in kinds.values()), default=0))
    bars = []
    for summary, kinds in zip(cells.summaries, peaks, strict=True):
        colours = {"allocated": names.colour(summary), "reserved": "neutral"}
        parts = tuple(BarPart(kind, value / scale, colours[kind], quantity(value, "bytes")) for kind, value in kinds.items())
        text = " / ".join(part.text for part in parts) + launches_note(summary) if parts else summary.status
        bars.append(Bar(group=names.group(summary), name=names.name(summary), parts=parts, text=text))
    has_reserved = any(len(kinds) == 2 for kinds in peaks)
    yield from bar_drawing(
        bars,
        key="memory",
        title=f"Peak memory of the worst rank ({unit}, less is better)",
        description="The highest peak of any rank in any launch"
        f"{': allocated, with reserved in grey behind it' if has_reserved else ''}.",
        is_layered=True,
        legend=[("reserved", "neutral")] if has_reserved else (),
        notes=[f"{text}." for text in memory_sources(cells.summaries)],
    )


def memory_sources(summaries: Sequence[CellSummary]) -> list[str]:
    """Return the sources of the memory of cells that ended ok, each with what it counts."""
    memories = [record["memory"] for summary in summaries for record in summary.ok if record["memory"]]
    sources = dict.fromkeys(memory["source"] for memory in memories)
    return [f"{source}: {_SOURCES.get(source, 'an unknown source')}" for source in sources]
