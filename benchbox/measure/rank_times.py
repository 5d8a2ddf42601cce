"""Times of calls that all ranks make together, of which the slowest rank's count."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def time_calls(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds of one of `calls` calls that begin when all ranks are ready."""
    _finish(device)
    if dist.is_initialized():
        dist.barrier()
        _finish(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _finish(device)
    return (time.perf_counter() - start) / calls


def slowest_over_ranks(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Return the times of the slowest rank, the same on all ranks, so that all of them take as many repetitions."""
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
