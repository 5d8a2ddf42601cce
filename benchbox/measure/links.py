"""Times of collectives between the ranks of a group, by size."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchbox.measure.rank_times import max_over_ranks, time_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_WARMUP = 2
# Calls per size: enough for a median, and no more than a few seconds for the largest size.
_CALLS, _LARGE_CALLS, _LARGE_BYTES = 21, 7, 2**22


def time_collectives(
    sizes: Sequence[int], device: torch.device, on_size: Callable[[], None]
) -> dict[str, list[tuple[int, float]]]:
    """Return (bytes, seconds) of one call by collective, the median over calls of the slowest rank's time.

    The bytes are those of the larger of input and output, as in the collectives of a launch record. Every rank gets the same.

    Args:
        sizes: bytes, rounded up to whole elements of every rank.
        on_size: called after each size of each collective.
    """
    times: dict[str, list[tuple[int, float]]] = {}
    for name in COLLECTIVES:
        times[name] = []
        for size in sizes:
            ranks = dist.get_world_size()
            shard = torch.zeros(-(-size // (4 * ranks)), device=device)
            whole = torch.zeros(shard.numel() * ranks, device=device)
            call = _call(name, whole, shard)
            calls = _CALLS if size < _LARGE_BYTES else _LARGE_CALLS
            seconds = [time_calls(call, 1, device) for _ in range(_WARMUP + calls)]
            times[name].append((whole.nbytes, median(max_over_ranks(seconds[_WARMUP:], device))))
            on_size()
    return times


def _call(name: str, whole: torch.Tensor, shard: torch.Tensor) -> Callable[[], object]:
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, shard)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(shard, whole)
    return lambda: dist.broadcast(whole, src=0)
