"""The ranks of every cell: where each spends a step, and which one the others wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.quantities import quantity
from benchbox.analysis.stragglers import describe_ranks, mean_split
from benchbox.analysis.summary import label
from benchbox.report.charts import FULL, BarData, BarPart, Chart, LegendEntry, layout_chart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.analysis.summary import CellSummary

MAX_STRIPS = 64  # with more ranks in all cells together, only cells that have a sentence are drawn

NOTE = (
    "All ranks end a step together. What a rank does by itself is waiting for data, computing, and waiting for a core; at a "
    "collective it waits for the ranks that have not arrived, and for the transfer once all have."
)
PARTS = {
    "data_wait": ("p0", "waiting for data"),
    "compute": ("p2", "own work"),
    "core_wait": ("p6", "waiting for a core"),
    "rank_wait": ("p3", "waiting for other ranks"),
    "transfer": ("p1", "transfer"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSection:
    """Sentences on the cells in which a rank or the transfers stand out, and a strip for every rank."""

    sentences: tuple[str, ...]
    chart: Chart | None


def rank_section(summaries: Sequence[CellSummary], axes: Sequence[str]) -> RankSection | None:
    """Return the section; None for a run without a launch whose steps were split."""
    splits = [(summary, split) for summary in summaries if (split := mean_split(summary))]
    if not splits:
        return None
    described = {summary.cell_id: sentence for summary, _ in splits if (sentence := describe_ranks(summary))}
    strips = sum(len(split["compute"]) for _, split in splits)
    drawn = [(s, split) for s, split in splits if strips <= MAX_STRIPS or s.cell_id in described]
    return RankSection(
        sentences=tuple(
            f"{label(summary.cell, axes)}: {described[summary.cell_id]}."
            for summary, _ in splits
            if summary.cell_id in described
        ),
        chart=layout_chart(
            key="ranks",
            title="Where a step of each rank goes (ms)",
            description="Mean over steps and launches.",
            entries=[entry for summary, split in drawn for entry in _strips(summary, split, axes)],
            scale=1e-3,
            width=FULL,
            legend=[LegendEntry(colour=colour, text=text) for colour, text in PARTS.values()],
        ),
    )


def _strips(summary: CellSummary, split: dict[str, list[float]], axes: Sequence[str]) -> list[BarData]:
    strips = []
    for rank in range(len(split["compute"])):
        parts = tuple(
            BarPart(value=split[part][rank], colour=colour, title=f"{text} {quantity(split[part][rank], 's')}")
            for part, (colour, text) in PARTS.items()
        )
        total = quantity(sum(part.value for part in parts), "s")
        strips.append(BarData(group=label(summary.cell, axes), name=f"rank {rank}", parts=parts, spread=None, text=total))
    return strips
