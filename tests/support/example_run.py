"""Example runs for tests that read runs. No number was measured. Records go through `assemble_record`, like real ones."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from benchbox.registry.recipes import recipe_by_name
from benchbox.spec.cell import Cell, MeasureSpec
from benchbox.store.assemble import assemble_record
from benchbox.store.run import Run, RunStore

if TYPE_CHECKING:
    from pathlib import Path

MEASURE = MeasureSpec(warmup_steps=1, steps=4, launches=2)
CELL = Cell(policy="example", size="tiny", backend="ddp", world_size=2, batch=2)
SHARES = {"data_wait": 0.05, "forward": 0.3, "backward": 0.4, "clip": 0.05, "optimizer": 0.15, "zero_grad": 0.02, "sync": 0.03}
MIB = 2**20

OOM = {
    "type": "OutOfMemoryError",
    "message": "tried to allocate 2.00 GiB",
    "rank": 1,
    "phase": "backward",
    "traceback": "Traceback (most recent call last):\n  ...\ntorch.OutOfMemoryError: tried to allocate 2.00 GiB",
}


_FSDP = {"model_class": "FullyShardedDataParallel", "optimizer_chain": ["AcceleratedOptimizer", "AdamW"]}
_ZERO = {
    "model_class": "DeepSpeedEngine",
    "optimizer_chain": ["DeepSpeedOptimizerWrapper", "DeepSpeedZeroOptimizer", "AdamW"],
    "sharding": "gradients and optimizer state partitioned over 2 ranks",
}
WRAPPED: dict[str, dict[str, Any]] = {
    "single": {"model_class": "Example", "optimizer_chain": ["AcceleratedOptimizer", "AdamW"], "sharding": None},
    "ddp": {
        "model_class": "DistributedDataParallel",
        "optimizer_chain": ["AcceleratedOptimizer", "MasterWeightOptimizer", "AdamW"],
        "sharding": "replicated",
    },
    "fsdp1_full": _FSDP | {"sharding": "FULL_SHARD in 3 units"},
    "fsdp2": _FSDP | {"model_class": "FSDPExample", "sharding": "S(0) on mesh (2,) in 3 units"},
    "zero1": _ZERO | {"sharding": "optimizer state partitioned over 2 ranks"},
    "zero2": _ZERO,
    "zero3": _ZERO | {"sharding": "parameters, gradients and optimizer state partitioned over 2 ranks"},
}


def trainable_numel(cell: Cell) -> int:
    return 2001 if cell.freeze == "full" else 1234


def shard_numel(cell: Cell, rank: int) -> int:
    """Return the elements that a rank steps: all that train, or its part of them."""
    if cell.backend in ("single", "ddp"):
        return trainable_numel(cell)
    return (trainable_numel(cell) + rank) // cell.world_size  # whole numbers that add up: the last ranks have one more


def parameter_numel(cell: Cell, rank: int) -> int:
    """Return the elements of parameters that a rank holds: all of the policy, or its part of them."""
    return 2001 if cell.backend in ("single", "ddp", "zero1", "zero2") else (2001 + rank) // cell.world_size


def rank_result(cell: Cell, rank: int, *, step_s: float = 0.2, launch: int = 1, cuda: bool = False) -> dict[str, Any]:
    """Return the content of one rank's `rank<r>.json`. Rank 1 is the slowest; a later launch is a little slower."""
    steps = [step_s * (1 + 0.01 * step + 0.05 * rank + 0.02 * launch) for step in range(MEASURE.steps)]
    fused = {"clip": "DeepSpeed clips inside its optimizer step"} if cell.backend.startswith("zero") else {}
    shares = {name: share for name, share in SHARES.items() if name not in fused}
    total = sum(shares.values())
    curve = [2.0 / (step + 1) for step in range(MEASURE.warmup_steps + MEASURE.steps)]
    allocated = (100 + 10 * rank + 50 * cell.cams) * MIB
    return {
        "rank": rank,
        "world_size": cell.world_size,
        "observed": {
            "backend": cell.backend,
            **WRAPPED.get(cell.backend, WRAPPED["single"]),
            "shard_numel": shard_numel(cell, rank),
            "trainable_numel": trainable_numel(cell),
            "total_numel": 2001,
            "attention_kernel": f"{cell.attention}:flash_cpu" if cell.attention == "sdpa" else cell.attention,
            "checkpointed_modules": 4 if cell.checkpointing else 0,
            "world_size": cell.world_size,
            "device": "NVIDIA H200" if cuda else "cpu",
        },
        "step_time_s": steps,
        "phases_s": {name: [step * share / total for step in steps] for name, share in shares.items()},
        "fused_phases": fused,
        "samples": cell.batch * cell.accumulation * MEASURE.steps,
        "loss": list(curve),
        "grad_norm": list(curve),
        "memory": {
            "source": "torch.cuda" if cuda else "tensor_storage",
            "allocated_peak_bytes": allocated,
            "reserved_peak_bytes": allocated + 20 * MIB if cuda else None,
            "reason": None if cuda else "host memory is not reserved by an allocator of torch's",
        },
        "collectives": {"all_reduce": {"count": 3, "bytes": 8004}, "all_gather": {"count": 2, "bytes": 8004}},
        "flops": {
            "model_flops_per_step": 10**9,
            "recomputed_flops_per_step": 2 * 10**8,
            "reason": None,
            "per_tower": {
                "vision": {"forward": 10**8, "backward": 2 * 10**8, "recomputed": 0},
                "backbone": {"forward": 2 * 10**8, "backward": 5 * 10**8, "recomputed": 2 * 10**8},
            },
        },
        "mfu": 0.4 - 0.1 * rank if cuda else None,
        "hfu": 0.5 - 0.1 * rank if cuda else None,
        "mfu_reason": None if cuda else "the peak of this device is unknown",
        "skipped_steps": [],
        "unchecked_reason": None,
        "host": example_host(rank, window_s=sum(steps)),
        "data": {"kind": "synthetic", "mode": "policy", "validation": 0.0, "cameras": [], "datasets": []},
        "environment": {"machine": "Example CPU, 2 cores", "torch": "2.13.0", "python": "3.12"},
        "config": cell.to_dict(),
    }


def example_host(rank: int, *, window_s: float) -> dict[str, Any]:
    """Return what a rank sampled of a quiet host. It has so many cores that the kernel's ticks tell even of short steps."""
    counters = {
        "window_s": window_s,
        "cores": 64,
        "busy_s": 2.0 * window_s,
        "steal_s": 0.0,
        "load_average": {"start": 2.0, "end": 2.0},
        "frequency_mhz": {"start": 2100.0, "end": 2100.0},
        "thermal_throttle_events": 0,
        "quota_throttled_s": 0.0,
        "reasons": {},
    }
    return {
        "local_rank": rank,
        "cpu_s": window_s,
        "counters": counters if rank == 0 else None,
        "device": None,
        "device_reason": "the rank does not train on an NVIDIA device",
    }


def example_precision(cell: Cell, *, cuda: bool = False) -> dict[str, Any]:
    """Return the audit result of a training with correct master weights, or of what the recipe has in place of them."""
    recipe = recipe_by_name(cell.recipe)
    stepped = recipe.stepped or recipe.storage
    census = [
        {
            "rank": rank,
            "kind": kind,
            "dtype": dtype,
            "device": f"cuda:{rank}" if cuda else "cpu",
            "tensors": 3,
            "elements": (elements := (parameter_numel if kind == "parameter" else shard_numel)(cell, rank)),
            "bytes": elements * (4 if dtype == "float32" else 2),
        }
        for rank in range(cell.world_size)
        for kind, dtype in (
            ("parameter", recipe.storage),
            ("master", stepped),
            ("exp_avg", stepped),
            ("exp_avg_sq", stepped),
        )
    ]
    numbers = {"edq": 1.0, "updates_lost": 0.0, "second_moment_stalled": None}
    return {"census": census, "findings": [], "not_judged": {}, "numbers": numbers, "problems": []}


def example_record(
    cell: Cell = CELL, launch: int = 1, *, status: str = "ok", error: dict[str, Any] | None = None, **results: Any
) -> dict[str, Any]:
    """Return a launch record; a launch that is not ok has no rank results."""
    ranks = [rank_result(cell, rank, launch=launch, **results) for rank in range(cell.world_size)] if status == "ok" else []
    return assemble_record(
        cell=cell,
        launch=launch,
        measure=MEASURE,
        rank_results=ranks,
        status=status,
        error=error,
        started_at="2026-01-01T00:00:00+00:00",
        duration_s=14.2,
        precision=example_precision(cell, cuda=bool(results.get("cuda"))),
        environment={"policy_sha256": "0" * 64},
    )


def steady_records(cell: Cell = CELL, *, step_s: float, launches: int = 5, started: str = "2026-01-01") -> list[dict[str, Any]]:
    """Return records of launches whose median steps differ by tenths of a percent. `started` is the day of the launches."""
    middle = 1.05 + 0.01 * (MEASURE.steps - 1) / 2  # of the factors in `rank_result`
    records = [
        example_record(cell, launch, step_s=step_s * (1 + 0.001 * (launch % 3)) / (middle + 0.02 * launch))
        for launch in range(1, launches + 1)
    ]
    return [record | {"started_at": f"{started}T00:{record['launch']:02}:00+00:00"} for record in records]


def example_run(cells: list[Cell], **changes: Any) -> Run:
    values: dict[str, Any] = {
        "name": "example",
        "matrix_file": "matrices/example.yaml",
        "matrix": {"policy": "example", "axes": {"backend": sorted({cell.backend for cell in cells})}},
        "reference": {"backend": "zero2"},
        "thresholds": [{"metric": "status", "where": {}, "expect": "ok"}],
        "measure": asdict(MEASURE),
        "cells": {cell.cell_id: cell.to_dict() for cell in cells},
        "skipped": [],
    }
    return Run(**values | changes)


def write_example(path: Path, *, policy: str = "example", failing: bool = True, cuda: bool = False) -> RunStore:
    """Write a run of FSDP against ZeRO-2 at 1 and 4 cameras, eager and sdpa, with one skipped cell.

    If `failing`, another cell runs out of memory.
    """
    base = replace(CELL, policy=policy)
    kernels = ({"attention": "eager", "checkpointing": False}, {"attention": "sdpa", "checkpointing": True})
    speed = {"fsdp1_full": 0.31, "zero2": 0.2}
    cells = [replace(base, backend=b, cams=cams, **kernel) for b in speed for cams in (1, 4) for kernel in kernels]
    skipped = {"cell": replace(base, backend="zero3", checkpointing=True).to_dict(), "reason": "zero3 refuses checkpointing"}
    axes = {"backend": list(speed), "cams": [1, 4], "kernels": list(kernels)}
    store = RunStore(path)
    store.write_run(example_run(cells, skipped=[skipped], matrix={"policy": policy, "axes": axes}))
    for launch in range(1, MEASURE.launches + 1):
        for cell in cells:
            if failing and cell is cells[2]:
                if launch == 1:
                    store.write_record(example_record(cell, launch, status="oom", error=OOM))
                continue
            step_s = speed[cell.backend] * (1 + 0.3 * cell.cams) * (1.2 if cell.checkpointing else 1)
            store.write_record(example_record(cell, launch, step_s=step_s, cuda=cuda))
    return store
