"""Merging the results of all ranks and the outcome of their process group into one launch record."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, TypeVar, cast

from benchbox.store.environments import merge_environments
from benchbox.store.host_state import merge_host_state
from benchbox.store.record import SCHEMA_VERSION
from benchbox.store.step_split import split_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchbox.registry.launch_environment import LaunchEnvironment
    from benchbox.registry.launch_record import (
        CollectiveRecord,
        Compilation,
        DataRecord,
        ErrorRecord,
        Flops,
        LaunchRecord,
        Memory,
        ObservedRecord,
        Peak,
        Phase,
        Precision,
        StepTime,
        Throughput,
        TowerFlops,
    )
    from benchbox.spec.cell import Cell, MeasureSpec
    from benchbox.store.rank_result import RankResult

_Number = TypeVar("_Number", int, float)

# Ranks may differ in these, so the record keeps one value per rank. A difference in any other observation is a mismatch.
_OBSERVED_PER_RANK = ("shard_numel", "device", "video_decoder", "micro_batch_sizes")


def assemble_record(
    *,
    cell: Cell,
    launch: int,
    measure: MeasureSpec,
    rank_results: Sequence[RankResult],
    status: str,
    error: ErrorRecord | None,
    started_at: str,
    duration_s: float,
    environment: LaunchEnvironment | None,
    precision: Precision | None,
) -> LaunchRecord:
    """Return the launch record of a process group.

    When the result of any rank is missing, every measured key is null: part of a group is not a measurement. When a launch
    failed after its timed steps, their times stay in the record beside the error, without a throughput. A status of `ok` is
    replaced if the ranks disagree on the number of steps (`desync`), or with each other or the request on what was observed
    (`mismatch`), or if the result of a rank was not checked against the request (`crash`).

    Args:
        rank_results: contents of the `rank<r>.json` files that were written, in any order.
        precision: the audit's judgement of the facts that the ranks recorded.
    """
    ranks = sorted(rank_results, key=lambda result: int(result["rank"]))
    complete = [result["rank"] for result in ranks] == list(range(cell.world_size))
    if status == "ok":
        contradiction = _contradiction(ranks, complete, cell.world_size, measure.steps)
        if contradiction is not None:
            status, error = contradiction
    rank_0 = ranks[0] if ranks else None
    merged = ranks if complete else []
    times = _step_time(merged)
    split, split_reason = split_steps(merged)
    return {
        "schema_version": SCHEMA_VERSION,
        "cell_id": cell.cell_id,
        "cell": cell.to_dict(),
        "launch": launch,
        "status": status,
        "error": error,
        "warmup_steps": measure.warmup_steps,
        "steps": measure.steps,
        "memory_limit_bytes": measure.memory_limit,
        "observed": _observed(merged),
        "step_time_s": times,
        "phases_s": _phases(merged),
        "fused_phases": {phase: reason for result in ranks for phase, reason in (result.get("fused_phases") or {}).items()},
        "throughput": _throughput(cell, times) if status == "ok" and times else None,
        "memory": _memory(merged),
        "collectives": _collectives(merged),
        "flops": _flops(merged),
        "compilation": _compilation(merged),
        "mfu": _of_all(min, [result.get("mfu") for result in merged]),
        "hfu": _of_all(min, [result.get("hfu") for result in merged]),
        "mfu_reason": next((result["mfu_reason"] for result in merged if result.get("mfu_reason")), None),
        "unchecked_reason": next((result["unchecked_reason"] for result in merged if result.get("unchecked_reason")), None),
        "host": merge_host_state(merged),
        "step_split_s": split,
        "step_split_reason": split_reason,
        "data": _data(merged),
        "precision": precision if merged else None,
        "samples": [result["samples"] for result in merged] if merged and all("samples" in r for r in merged) else None,
        "loss": rank_0.get("loss") if complete and rank_0 else None,  # the global mean, so all ranks have the same
        "grad_norm": rank_0.get("grad_norm") if complete and rank_0 else None,
        "skipped_steps": rank_0.get("skipped_steps") if complete and rank_0 else None,  # all ranks skip the same steps
        "environment": {**(environment or {}), **merge_environments(ranks)} or None,
        "config": (rank_0.get("config") if rank_0 else None) or cell.to_dict(),
        "started_at": started_at,
        "duration_s": duration_s,
    }


def _contradiction(ranks: Sequence[RankResult], complete: bool, world_size: int, steps: int) -> tuple[str, ErrorRecord] | None:
    """Return status and error of a group whose results contradict its `ok`, or None when they are consistent."""

    def failure(kind: str, message: str, rank: int | None = None) -> ErrorRecord:
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
    for result in ranks:
        if reason := result.get("unchecked_reason"):
            return "crash", failure("UncheckedResult", reason, result["rank"])
    if not all(result.get("observed") for result in ranks):
        return None
    for key in ranks[0]["observed"]:
        if key in _OBSERVED_PER_RANK:
            continue
        values = [result["observed"].get(key) for result in ranks]
        deviating = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if deviating is not None:
            message = f"ranks disagree on observed {key}: {values[0]!r} on rank 0, {values[deviating]!r} on rank {deviating}"
            return "mismatch", failure("MismatchError", message, deviating)
    return None


def _observed(ranks: Sequence[RankResult]) -> ObservedRecord | None:
    if not ranks or not all(result.get("observed") for result in ranks):
        return None
    # Results that an earlier benchbox wrote lack some of the keys, and so does their record.
    keys = [key for key in _OBSERVED_PER_RANK if any(key in result["observed"] for result in ranks)]
    per_rank = {key: [result["observed"].get(key) for result in ranks] for key in keys}
    return cast("ObservedRecord", {**ranks[0]["observed"], **per_rank})


def _step_time(ranks: Sequence[RankResult]) -> StepTime | None:
    per_rank = [list(result.get("step_time_s") or []) for result in ranks]
    if not per_rank or not per_rank[0] or len({len(steps) for steps in per_rank}) > 1:
        return None
    return {"per_rank": per_rank, "slowest": [max(step) for step in zip(*per_rank, strict=True)]}


def _phases(ranks: Sequence[RankResult]) -> dict[str, Phase] | None:
    if not ranks or not all(result.get("phases_s") for result in ranks):
        return None
    shared = [phase for phase in ranks[0]["phases_s"] if all(phase in result["phases_s"] for result in ranks)]
    return {phase: {"per_rank": [list(result["phases_s"][phase]) for result in ranks]} for phase in shared}


def _throughput(cell: Cell, times: StepTime) -> Throughput:
    return {
        "global_samples_per_s": cell.samples_per_step / median(times["slowest"]),
        "per_rank_samples_per_s": [cell.samples_per_rank / median(steps) for steps in times["per_rank"]],
    }


def _memory(ranks: Sequence[RankResult]) -> Memory | None:
    memories = [memory for result in ranks if (memory := result.get("memory"))]
    if not memories or len(memories) < len(ranks):
        return None
    peaks: list[Peak] = [
        {"allocated_peak_bytes": memory["allocated_peak_bytes"], "reserved_peak_bytes": memory["reserved_peak_bytes"]}
        for memory in memories
    ]
    # The worst rank is the one whose device needed most memory: by reserved bytes where they are known, else by allocated ones.
    # Each figure is the largest over all ranks, so that neither hides behind the other.
    allocated = _of_all(max, [peak["allocated_peak_bytes"] for peak in peaks])
    reserved = _of_all(max, [peak["reserved_peak_bytes"] for peak in peaks])
    sizes = [peak["allocated_peak_bytes"] if reserved is None else peak["reserved_peak_bytes"] for peak in peaks]
    largest = allocated if reserved is None else reserved
    worst = None if largest is None else sizes.index(largest)
    merged: Memory = {
        "source": memories[0]["source"],
        "reason": memories[0].get("reason"),
        "per_rank": peaks,
        "worst": {"rank": worst, "allocated_peak_bytes": allocated, "reserved_peak_bytes": reserved},
    }
    if any("device_bytes" in memory for memory in memories):
        merged["device_bytes"] = [memory.get("device_bytes") for memory in memories]
        merged["allocation_retries"] = [memory.get("allocation_retries") for memory in memories]
    return merged


def _collectives(ranks: Sequence[RankResult]) -> dict[str, CollectiveRecord] | None:
    collectives_of_ranks = [collectives for result in ranks if (collectives := result.get("collectives")) is not None]
    if not ranks or len(collectives_of_ranks) < len(ranks):
        return None
    largest: dict[str, CollectiveRecord] = {}
    for operations in collectives_of_ranks:
        for name, calls in operations.items():
            entry = largest.setdefault(name, {"count": 0, "bytes": 0})
            entry["count"] = max(entry["count"], calls["count"])
            entry["bytes"] = max(entry["bytes"], calls["bytes"])
    return largest


def _flops(ranks: Sequence[RankResult]) -> Flops | None:
    flops_of_ranks = [flops for result in ranks if (flops := result.get("flops")) is not None]
    if not ranks or len(flops_of_ranks) < len(ranks):
        return None
    merged: Flops = {
        "model_flops_per_step": _of_all(sum, [flops.get("model_flops_per_step") for flops in flops_of_ranks]),
        "recomputed_flops_per_step": _of_all(sum, [flops.get("recomputed_flops_per_step") for flops in flops_of_ranks]),
        "reason": next((flops["reason"] for flops in flops_of_ranks if flops.get("reason")), None),
        "per_tower": _towers([flops.get("per_tower") for flops in flops_of_ranks]),
    }
    if all("per_tower_reason" in flops for flops in flops_of_ranks):
        merged["per_tower_reason"] = next((reason for flops in flops_of_ranks if (reason := flops["per_tower_reason"])), None)
    return merged


def _compilation(ranks: Sequence[RankResult]) -> Compilation | None:
    """Return the records of the ranks that compiled anything; of all of them where `compile` asks for it."""
    per_rank = [compilation for result in ranks if (compilation := result.get("compilation")) is not None]
    return {"per_rank": per_rank} if per_rank else None


def _towers(formulas: Sequence[dict[str, TowerFlops] | None]) -> dict[str, TowerFlops] | None:
    """Return the cost of every tower, summed over ranks; None when a rank does not know it."""
    towers = [formula for formula in formulas if formula]
    if len(towers) < len(formulas):
        return None
    return {
        tower: {
            "forward": sum(formula[tower]["forward"] for formula in towers),
            "backward": sum(formula[tower]["backward"] for formula in towers),
            "recomputed": sum(formula[tower]["recomputed"] for formula in towers),
        }
        for tower in towers[0]
    }


def _data(ranks: Sequence[RankResult]) -> DataRecord | None:
    """Return the description of the data, with the samples that all ranks together drew of each dataset."""
    data_of_ranks = [data for result in ranks if (data := result.get("data")) is not None]
    if not ranks or len(data_of_ranks) < len(ranks):
        return None
    first, *_ = data_of_ranks
    drawn = zip(*([dataset["drawn"] for dataset in data["datasets"]] for data in data_of_ranks), strict=True)
    pairs = zip(first["datasets"], drawn, strict=True)
    return {**first, "datasets": [{**dataset, "drawn": _of_all(sum, numbers)} for dataset, numbers in pairs]}


def _of_all(combine: Callable[[list[_Number]], _Number], values: Sequence[_Number | None]) -> _Number | None:
    """Combine the values of all ranks; None when one of them is unknown."""
    numbers = [value for value in values if value is not None]
    return combine(numbers) if numbers and len(numbers) == len(values) else None
