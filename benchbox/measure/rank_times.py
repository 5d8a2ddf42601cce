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


def max_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each value over ranks, the same on all of them: of times those of the slowest rank."""
    maxima = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return maxima.tolist()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
