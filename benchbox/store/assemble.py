"""Results of ranks and the outcome of their group -> one launch record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from benchbox.store.record import SCHEMA_VERSION

if TYPE_CHECKING:
    from benchbox.spec.cell import Cell, MeasureSpec

Rank = Mapping[str, Any]

# Ranks rightly differ in these, so the record keeps one value a rank; a difference in any other observation is a mismatch.
_OBSERVED_PER_RANK = ("shard_numel", "device")


def assemble_record(
    *,
    cell: Cell,
    launch: int,
    measure: MeasureSpec,
    rank_results: Sequence[Rank],
    status: str,
    error: Mapping[str, Any] | None,
    started_at: str,
    duration_s: float,
    environment: Mapping[str, Any] | None,
    precision: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The launch record (`benchbox.store.record.LaunchRecord`).

    `rank_results` are the `rank<r>.json` that were written, in any order, `precision` what the audit made of what they saw.
    When some rank wrote none, every measured key is null: part of a group is not a measurement. A group that claims `ok` is
    believed only if its ranks agree: on the number of steps (else `desync`), and with each other and the request on what was
    observed (else `mismatch`).
    """
    ranks = sorted(rank_results, key=lambda result: int(result["rank"]))
    complete = [result["rank"] for result in ranks] == list(range(cell.world_size))
    if status == "ok":
        doubt = _doubt(ranks, complete, cell.world_size, measure.steps)
        if doubt is not None:
            status, error = doubt
    first = ranks[0] if ranks else {}
    merged = ranks if complete else []
    times = _step_time(merged)
    return {
        "schema_version": SCHEMA_VERSION,
        "cell_id": cell.cell_id,
        "cell": cell.to_dict(),
        "launch": launch,
        "status": status,
        "error": dict(error) if error is not None else None,
        "warmup_steps": measure.warmup_steps,
        "steps": measure.steps,
        "observed": _observed(merged),
        "step_time_s": times,
        "phases_s": _phases(merged),
        "fused_phases": {phase: reason for result in ranks for phase, reason in (result.get("fused_phases") or {}).items()},
        "throughput": _throughput(cell, times) if status == "ok" and times else None,
        "memory": _memory(merged),
        "collectives": _collectives(merged),
        "flops": _flops(merged),
        "mfu": _lowest([result.get("mfu") for result in merged]),
        "hfu": _lowest([result.get("hfu") for result in merged]),
        "mfu_reason": next((result["mfu_reason"] for result in merged if result.get("mfu_reason")), None),
        "precision": dict(precision) if precision is not None and merged else None,
        "samples": [result["samples"] for result in merged] if merged and all("samples" in r for r in merged) else None,
        "loss": first.get("loss") if complete else None,  # the global mean: every rank holds the same
        "grad_norm": first.get("grad_norm") if complete else None,
        "environment": {**(environment or {}), **(first.get("environment") or {})} or None,
        "config": first.get("config") or cell.to_dict(),
        "started_at": started_at,
        "duration_s": duration_s,
    }


def _doubt(ranks: Sequence[Rank], complete: bool, world_size: int, steps: int) -> tuple[str, dict[str, Any]] | None:
    """Status and error of a group whose results belie its `ok`, or None when they bear it out."""

    def failure(kind: str, message: str, rank: int | None = None) -> dict[str, Any]:
        return {"type": kind, "message": message, "rank": rank, "phase": None, "traceback": None}

    if not complete:
        present = {int(result["rank"]) for result in ranks}
        missing = [rank for rank in range(world_size) if rank not in present]
        if missing:
            return "crash", failure("MissingRank", f"no result from rank {', '.join(map(str, missing))}", missing[0])
        return "mismatch", failure("MismatchError", f"{len(ranks)} results from a group of {world_size}")
    counts = [len(result.get("step_time_s") or []) for result in ranks]
    if len(set(counts)) > 1:
        return "desync", failure("DesyncError", f"ranks measured different numbers of steps: {counts}")
    if counts[0] != steps:
        return "mismatch", failure("MismatchError", f"{counts[0]} steps were measured and {steps} requested")
    for key in _shared_keys(ranks):
        seen = [result["observed"].get(key) for result in ranks]
        other = next((rank for rank, value in enumerate(seen) if value != seen[0]), None)
        if other is not None:
            message = f"ranks disagree on observed {key}: {seen[0]!r} on rank 0, {seen[other]!r} on rank {other}"
            return "mismatch", failure("MismatchError", message, other)
    return None


def _shared_keys(ranks: Sequence[Rank]) -> list[str]:
    if not all(result.get("observed") for result in ranks):
        return []
    return [key for key in ranks[0]["observed"] if key not in _OBSERVED_PER_RANK]


def _observed(ranks: Sequence[Rank]) -> dict[str, Any] | None:
    if not ranks or not all(result.get("observed") for result in ranks):
        return None
    per_rank = {key: [result["observed"].get(key) for result in ranks] for key in _OBSERVED_PER_RANK}
    return {**ranks[0]["observed"], **per_rank}


def _step_time(ranks: Sequence[Rank]) -> dict[str, Any] | None:
    per_rank = [list(result.get("step_time_s") or []) for result in ranks]
    if not per_rank or not per_rank[0] or len({len(steps) for steps in per_rank}) > 1:
        return None
    return {"per_rank": per_rank, "slowest": [max(step) for step in zip(*per_rank, strict=True)]}


def _phases(ranks: Sequence[Rank]) -> dict[str, Any] | None:
    if not ranks or not all(result.get("phases_s") for result in ranks):
        return None
    shared = [phase for phase in ranks[0]["phases_s"] if all(phase in result["phases_s"] for result in ranks)]
    return {phase: {"per_rank": [list(result["phases_s"][phase]) for result in ranks]} for phase in shared}


def _throughput(cell: Cell, times: Mapping[str, Any]) -> dict[str, Any]:
    own = cell.batch * cell.accumulation
    return {
        "global_samples_per_s": own * cell.world_size / median(times["slowest"]),
        "per_rank_samples_per_s": [own / median(steps) for steps in times["per_rank"]],
    }


def _memory(ranks: Sequence[Rank]) -> dict[str, Any] | None:
    found = [result.get("memory") for result in ranks]
    if not found or not all(found):
        return None
    peaks = [{key: memory[key] for key in ("allocated_peak_bytes", "reserved_peak_bytes")} for memory in found if memory]
    # The rank named is the one whose device had to hold most: by reserved bytes where they are known, else by allocated ones.
    # Each figure is the largest over all ranks, so that neither hides behind the other.
    largest = {key: _largest([peak[key] for peak in peaks]) for key in peaks[0]}
    by = "allocated_peak_bytes" if largest["reserved_peak_bytes"] is None else "reserved_peak_bytes"
    worst = max(range(len(peaks)), key=lambda rank: peaks[rank][by] or 0)
    return {
        "source": ranks[0]["memory"]["source"],
        "reason": ranks[0]["memory"].get("reason"),
        "per_rank": peaks,
        "worst": {"rank": worst, **largest},
    }


def _collectives(ranks: Sequence[Rank]) -> dict[str, Any] | None:
    if not ranks or any(result.get("collectives") is None for result in ranks):
        return None
    largest: dict[str, dict[str, int]] = {}
    for result in ranks:
        for name, seen in result["collectives"].items():
            entry = largest.setdefault(name, {"count": 0, "bytes": 0})
            for key in entry:
                entry[key] = max(entry[key], seen[key])
    return largest


def _flops(ranks: Sequence[Rank]) -> dict[str, Any] | None:
    if not ranks or any(result.get("flops") is None for result in ranks):
        return None
    seen = [result["flops"] for result in ranks]
    counted = {key: _sum([flops.get(key) for flops in seen]) for key in ("model_flops_per_step", "recomputed_flops_per_step")}
    formulas = [flops.get("per_tower") for flops in seen]
    per_tower = None
    if all(formulas):
        towers = formulas[0]
        per_tower = {
            tower: {part: sum(formula[tower][part] for formula in formulas) for part in parts}
            for tower, parts in towers.items()
        }
    return {**counted, "reason": next((flops["reason"] for flops in seen if flops.get("reason")), None), "per_tower": per_tower}


def _lowest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _largest(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None
