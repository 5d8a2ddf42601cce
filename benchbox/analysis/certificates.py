"""Certificates of walks: the largest batch that fits, the first that does not, and the throughput at every batch tried.

They are made of launch records only. A walk that has not shown both batches itself has no certificate, and says why. The search
goes by the first launch of every batch. A batch of which a later launch runs out of memory does not fit all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from benchbox.analysis.summary import matrix_text
from benchbox.analysis.walk import Bounds, Outcome, bounds_from, walk_state
from benchbox.registry.metrics import metric_by_name
from benchbox.spec.cell import Cell

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import CellDict, ErrorRecord
    from benchbox.store.run import Run

LARGEST_BATCH = "largest batch"  # what a row on a walk is about, in place of a metric
ENDED: tuple[Outcome, ...] = ("complete", "capped")  # of searches that have a largest batch
_NO_ALLOCATOR = "the memory of a CPU rank is the bytes of its tensors: no allocator retries"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Result of a walk. `batches` are those that were tried, smallest first, and `reason` says why something is missing."""

    outcome: Outcome
    search: Outcome  # of the search, which later launches do not change
    batches: tuple[CellSummary, ...]
    largest: CellSummary | None  # that fits: no launch of it or of a smaller one ran out of memory
    beyond: CellSummary | None  # the smallest that does not fit
    fastest: CellSummary | None
    predicted_batch: int | None
    reason: str | None

    @property
    def is_complete(self) -> bool:
        """Return whether launches of this walk show both the largest batch that fits and that the one above it does not."""
        return self.outcome == "complete"

    @property
    def is_conclusive(self) -> bool:
        """Return whether launches show what fits: the search has ended, without a failure and without a contradiction."""
        return self.outcome not in ("unfinished", "failed", "contradictory")

    @property
    def probes(self) -> int:
        """Return the number of launches that searched: the first of every batch."""
        return sum(bool(summary.records) for summary in self.batches)

    @property
    def launches(self) -> int:
        """Return the number of all launches, with those that repeat the fastest batch."""
        return sum(len(summary.records) for summary in self.batches)

    @property
    def error(self) -> ErrorRecord | None:
        """Return the error of the first batch that does not fit, with its rank, phase and operation."""
        records = () if self.beyond is None else self.beyond.records
        return next((record["error"] for record in records if record["status"] == "oom"), None)

    @property
    def limit_bytes(self) -> int | None:
        """Return the memory of a rank: the declared limit, or that of the smallest device."""
        if self.largest is None or self.largest.evidence is None:
            return None
        record = self.largest.evidence
        devices = (record["memory"].get("device_bytes") if record["memory"] else None) or []
        return min((size for size in (*devices, record.get("memory_limit_bytes")) if size is not None), default=None)

    @property
    def peak_bytes(self) -> float | None:
        """Return the highest peak of a rank at the largest batch."""
        return None if self.largest is None else self.largest.peak_bytes

    @property
    def headroom_bytes(self) -> float | None:
        """Return the limit less the peak."""
        limit, peak = self.limit_bytes, self.peak_bytes
        return None if limit is None or peak is None else limit - peak

    @property
    def allocation_retries(self) -> int | None:
        """Return how often the allocator of a rank had to free its cache at the largest batch, the most over ranks."""
        record = self.largest.evidence if self.largest else None
        retries = (record["memory"].get("allocation_retries") if record and record["memory"] else None) or []
        return max((count for count in retries if count is not None), default=None)

    @property
    def retries_reason(self) -> str | None:
        """Return why the retries are unknown."""
        if self.allocation_retries is not None:
            return None
        if self.largest is None:
            return "no batch fits"
        is_host = any(record["memory"] and record["memory"]["source"] == "tensor_storage" for record in self.largest.ok)
        return _NO_ALLOCATOR if is_host else "the record does not have them"


def certificates(run: Run, summaries: Sequence[CellSummary]) -> list[Certificate]:
    """Return the result of every walk of a run, in the order of the plan."""
    by_id = {summary.cell_id: summary for summary in summaries}
    walks = [[by_id[cell_id] for cell_id in walk["cells"]] for walk in run.walks]
    shown = [(summary.cell, _first_status(summary)) for cells in walks for summary in cells if summary.records]
    return [
        _certificate(cells, walk["at_most"], walk["predicted_batch"], shown)
        for walk, cells in zip(run.walks, walks, strict=True)
    ]


def _certificate(
    cells: Sequence[CellSummary], at_most: int | None, predicted: int | None, shown: Sequence[tuple[CellDict, str]]
) -> Certificate:
    by_batch = {summary.cell["batch"]: summary for summary in sorted(cells, key=lambda summary: summary.cell["batch"])}
    statuses = {batch: _first_status(summary) for batch, summary in by_batch.items() if summary.records}
    bounds = bounds_from(cells[0].cell, shown)
    state = walk_state(statuses, start=cells[0].cell["batch"], at_most=at_most, predicted=predicted, bounds=bounds)
    ok = [summary for summary in by_batch.values() if first_throughput(summary) is not None]
    reason = None
    match state.outcome:
        case "unfinished":
            reason = "launches are missing: the same command continues"
        case "capped":
            fits = f"at_most {at_most}" if state.largest == at_most else f"batch {state.largest}, above at_most {at_most},"
            reason = f"{fits} fits, and no larger batch is tried"
        case "nothing fits":
            reason = "not even batch 1 fits"
        case "pruned":
            reason = pruning_reason(bounds)
        case "failed":
            failed = next(batch for batch, status in statuses.items() if status not in ("ok", "oom"))
            reason = f"batch {failed} ended {statuses[failed]}"
        case "contradictory":
            reason = f"batch {state.largest} fits, and batch {state.beyond} does not"
    outcome, largest, beyond = state.outcome, state.largest, state.beyond
    unsafe = min(
        (batch for batch, status in statuses.items() if status == "ok" and _out_of_memory(by_batch[batch])), default=None
    )
    if unsafe is not None:  # it fitted once
        largest = max((batch for batch, status in statuses.items() if status == "ok" and batch < unsafe), default=None)
        beyond = unsafe if beyond is None else min(beyond, unsafe)
        if state.outcome in ENDED:
            outcome, launches = "contradictory", by_batch[unsafe].records
            reason = f"batch {unsafe} ran out of memory in {_out_of_memory(by_batch[unsafe])} of {len(launches)} launches"
    if outcome in ENDED and (mixed := _mixed_memory(by_batch.values())):
        outcome, reason = "contradictory", f"launches that searched differ in {mixed}: --fresh measures them again"
    return Certificate(
        outcome=outcome,
        search=state.outcome,
        batches=tuple(by_batch.values()),
        largest=None if largest is None else by_batch[largest],
        beyond=None if beyond is None else by_batch[beyond],
        fastest=max(ok, key=lambda summary: first_throughput(summary) or 0.0, default=None),
        predicted_batch=predicted,
        reason=reason,
    )


def _mixed_memory(batches: Iterable[CellSummary]) -> str | None:
    """Return what launches that searched differ in and the memory that a batch takes or has may depend on; None if nothing."""
    records = [summary.records[0] for summary in batches if summary.records]
    environments = [record["environment"] for record in records if record["environment"]]
    memories = [record["memory"] for record in records if record["memory"]]
    values: dict[str, set[object]] = {
        "machine": {environment.get("machine") for environment in environments},
        "torch": {environment.get("torch") for environment in environments},
        "the memory of devices": {tuple(memory.get("device_bytes") or ()) for memory in memories},
    }
    return next((name for name, found in values.items() if len(found - {None, ()}) > 1), None)


def _first_status(summary: CellSummary) -> str:
    """Return the status of the launch that searched: later ones repeat the fastest batch, and do not change the search."""
    return summary.records[0]["status"]


def _out_of_memory(summary: CellSummary) -> int:
    """Return how many launches of a batch ran out of memory."""
    return sum(record["status"] == "oom" for record in summary.records)


def first_throughput(summary: CellSummary) -> float | None:
    """Return the samples per second of the launch that searched, by which the fastest batch is chosen."""
    first = summary.records[0]["launch"] if summary.records else None
    return summary.by_launch(metric_by_name("global_samples_per_s")).get(first) if first is not None else None


def pruning_reason(bounds: Bounds) -> str:
    """Return why no batch of a walk can fit, by the launch of another one that shows it."""
    assert bounds.fails_cell is not None
    values = ", ".join(f"{field}={matrix_text(bounds.fails_cell[field])}" for field in ("cams", "checkpointing"))
    cell_id = Cell.from_dict(dict(bounds.fails_cell)).cell_id
    return f"pruned: launch 1 of {cell_id} ({values}) ran out of memory at batch {bounds.fails}, and this needs no less"


def mean_probes(results: Sequence[Certificate]) -> float | None:
    """Return the mean number of launches that searched, over walks that have ended; None where none has."""
    ended = [result.probes for result in results if result.search in ENDED]
    return fmean(ended) if ended else None
