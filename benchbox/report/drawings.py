"""The charts of a run: throughput, memory, phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import CellSummary, label
from benchbox.registry.phases import PHASES
from benchbox.report.charts import FULL, Chart, Entry, Legend, Piece, chart

if TYPE_CHECKING:
    from collections.abc import Sequence

MEMORY_SOURCES = {
    "torch.cuda": "device memory, by the counters of torch's CUDA allocator",
    "tensor_storage": "bytes of live tensor storage on the host, from a separate untimed step: not device memory",
}

_BYTE_SCALES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COLOURS = 9


def draw(summaries: Sequence[CellSummary], axes: Sequence[str], compared: Sequence[str]) -> tuple[Chart, ...]:
    """Every chart that has something to show. Cells that differ only in `compared` stand together, one colour for each."""
    places = _Places(summaries, axes, compared)
    made = (_throughput(summaries, places), _memory(summaries, places), _phases(summaries, places))
    return tuple(drawing for drawing in made if drawing is not None)


class _Places:
    """Group, name and colour of every cell, and cells in the order of the groups."""

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


def _throughput(summaries: Sequence[CellSummary], places: _Places) -> Chart | None:
    entries = []
    for summary in summaries:
        spread = summary.values["global_samples_per_s"]
        text = summary.status if spread is None else f"{quantity(spread.value, 'samples/s')}{_flag(summary)}"
        pieces = () if spread is None else (Piece(value=spread.value, colour=places.colour(summary), title=text),)
        bounds = None if spread is None else (spread.low, spread.high)
        entries.append(Entry(group=places.group(summary), name=places.name(summary), pieces=pieces, spread=bounds, text=text))
    return chart(
        key="throughput",
        title="Throughput (samples/s, more is better)",
        description="Global samples per second of the slowest rank: the median over launches, whiskers from lowest to highest.",
        entries=entries,
        scale=1.0,
    )


def _memory(summaries: Sequence[CellSummary], places: _Places) -> Chart | None:
    entries = []
    largest = 0.0
    for summary in summaries:
        allocated, reserved = (summary.values[f"peak_{kind}_bytes"] for kind in ("allocated", "reserved"))
        pieces = []
        texts = []
        if allocated is not None:
            texts.append(quantity(allocated.value, "bytes"))
            pieces.append(Piece(value=allocated.value, colour=places.colour(summary), title=f"allocated {texts[-1]}"))
        if reserved is not None:
            texts.append(quantity(reserved.value, "bytes"))
            pieces.append(Piece(value=reserved.value, colour="rest", title=f"reserved {texts[-1]}"))
        largest = max([largest, *(piece.value for piece in pieces)])
        entries.append(
            Entry(
                group=places.group(summary),
                name=places.name(summary),
                pieces=tuple(pieces),
                spread=None,
                text=" / ".join(texts) + _flag(summary) if texts else summary.status,
                layered=True,
            )
        )
    scale, unit = next(((size, name) for size, name in _BYTE_SCALES if largest >= size), (1, "B"))
    sources = list(dict.fromkeys(record["memory"]["source"] for s in summaries for record in s.ok if record["memory"]))
    ": allocated, with reserved in grey behind it" if any(len(entry.pieces) == 2 for entry in entries) else ""
    behind = ": allocated, with reserved in grey behind it" if any(len(entry.pieces) == 2 for entry in entries) else ""
    return chart(
        key="memory",
        title=f"Peak memory of the worst rank ({unit}, less is better)",
        description=f"The highest peak of any rank in any launch{behind}.",
        entries=entries,
        scale=float(scale),
        notes=[f"{source}: {MEMORY_SOURCES.get(source, 'an unknown source')}." for source in sources],
    )


def _phases(summaries: Sequence[CellSummary], places: _Places) -> Chart | None:
    entries = []
    names: list[str] = []
    fused: dict[str, list[str]] = {}
    for summary in summaries:
        phases, step = summary.phases(), summary.mean_step_s()
        names += [phase for phase in phases if phase not in names]
        pieces = [
            Piece(value=seconds, colour=_phase_colour(phase), title=f"{phase} {quantity(seconds, 's')}")
            for phase, seconds in phases.items()
        ]
        if step is not None and (rest := step - sum(phases.values())) > 0.005 * step:
            pieces.append(Piece(value=rest, colour="rest", title=f"outside the phases {quantity(rest, 's')}"))
        for record in summary.ok[:1]:
            for phase, reason in record["fused_phases"].items():
                fused.setdefault(f"{phase} has no time of its own: {reason}", []).append(places.name(summary))
        text = summary.status if step is None else f"{quantity(step, 's')}{_flag(summary)}"
        entries.append(
            Entry(group=places.group(summary), name=places.name(summary), pieces=tuple(pieces), spread=None, text=text)
        )
    order = [phase for phase in PHASES if phase in names] + [phase for phase in names if phase not in PHASES]
    return chart(
        key="phases",
        title="Where a step goes (ms)",
        description="Mean time of each phase on the slowest rank, mean over launches; the phases add up to the mean step.",
        entries=entries,
        scale=1e-3,
        width=FULL,
        legend=[Legend(colour=_phase_colour(phase), text=phase) for phase in order],
        notes=[f"{', '.join(dict.fromkeys(cells))}: {reason}." for reason, cells in fused.items()],
    )


def _phase_colour(phase: str) -> str:
    return f"p{PHASES.index(phase)}" if phase in PHASES else "rest"


def _flag(summary: CellSummary) -> str:
    """A number of a cell that did not wholly succeed says so beside it."""
    if summary.whole:
        return ""
    return f" ({len(summary.ok)}/{summary.planned} ok)"
