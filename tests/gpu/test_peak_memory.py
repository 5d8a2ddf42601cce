"""Peaks of a record are those of the caching allocator."""

from __future__ import annotations

import gc
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.measure.memory import peak_memory, release_cached_memory, reset_peak_memory
from benchbox.session.build import build_cell_policy, build_session, open_cell_data
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from collections.abc import Iterable

MIB = 2**20


def allocate(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def test_the_peak_is_the_largest_sum_of_living_tensors(cuda: torch.device) -> None:
    before = torch.cuda.memory_allocated(cuda)
    reset_peak_memory(cuda)
    first, second = allocate(96), allocate(64)
    del first
    third = allocate(32)
    del second, third
    peaks = peak_memory(cuda)
    assert peaks is not None
    assert peaks["source"] == "torch.cuda"
    assert peaks["allocated_peak_bytes"] - before == 160 * MIB
    assert peaks["reserved_peak_bytes"] >= peaks["allocated_peak_bytes"]


def test_cached_memory_of_construction_is_not_in_the_peak(cuda: torch.device) -> None:
    release_cached_memory(cuda)
    reserved = torch.cuda.memory_reserved(cuda)
    construction = allocate(256)
    del construction
    assert torch.cuda.memory_reserved(cuda) >= reserved + 256 * MIB, "the allocator keeps what was freed"
    release_cached_memory(cuda)
    reset_peak_memory(cuda)
    step = allocate(32)
    peaks = peak_memory(cuda)
    del step
    assert peaks is not None
    assert peaks["reserved_peak_bytes"] < reserved + 64 * MIB


def replay(events: Iterable[dict[str, Any]], allocated: int) -> int:
    """Return the largest number of requested bytes, from the allocations and frees of an allocator's trace."""
    peak = allocated
    for event in events:
        if event["action"] == "alloc":
            allocated += event["size"]
        elif event["action"] == "free_requested":
            allocated -= event["size"]
        peak = max(peak, allocated)
    return peak


def test_the_peak_of_training_steps_is_in_the_allocators_trace(cuda: torch.device) -> None:
    """Replaying every allocation of two steps gives the peak, up to the allocator's rounding of sizes."""
    cell = tiny_cell(size="small", backend="single", world_size=1, batch=16)
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, rank=0)) as stream:
        session = build_session(cell, policy, stream.statistics)
        session.step(stream)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
        try:
            requested = torch.cuda.memory_stats(cuda)["requested_bytes.all.current"]
            reset_peak_memory(cuda)
            session.step(stream)
            session.step(stream)
            torch.cuda.synchronize()
            peaks, stats = peak_memory(cuda), torch.cuda.memory_stats(cuda)
            trace = torch.cuda.memory._snapshot()["device_traces"][cuda.index]
        finally:
            torch.cuda.memory._record_memory_history(None)
    assert peaks is not None
    assert peaks["allocated_peak_bytes"] == stats["allocated_bytes.all.peak"]
    assert peaks["reserved_peak_bytes"] == stats["reserved_bytes.all.peak"]
    replayed = replay(trace, requested)
    assert replayed == pytest.approx(stats["requested_bytes.all.peak"], rel=0.01)
    assert replayed <= peaks["allocated_peak_bytes"] <= 1.1 * replayed
