"""Highest rates that this rank reaches while the other ranks do the same: products, copies, updates and all-reduces."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import median, quantiles
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchbox.measure.rank_times import max_over_ranks, time_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchbox.store.peaks import MeasuredRate

# float32 products of a GPU run in TF32 where that is allowed, and are no products in float32 then.
TF32 = "tf32"
_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", TF32, "bfloat16", "float16")}

_STABLE = 0.03  # spread of the repetitions at which no more are taken
_ROUND, _MAX_ROUNDS = 5, 8
_REPETITION_S = 0.02  # calls are repeated for as long, so that ranks that start a little apart still run together
# A GPU lowers its clock when it has worked for a moment at its limit of power, and training is at that lower clock.
_SUSTAINED_S = {"cpu": 0.0, "cuda": 1.0}
# Layouts are compared by as many rows of the left factor, and in as long: the slowest may take minutes for a whole product.
_COMPARED_ROWS, _COMPARED_S = 256, 0.5


@dataclass(frozen=True, slots=True)
class CallTiming:
    """Seconds of one call on the slowest rank: the median of repetitions, and their interquartile range relative to it."""

    seconds: float
    spread: float
    repetitions: int

    def rate(self, amount: float, size: Sequence[int]) -> MeasuredRate:
        """Return the rate of a call that does `amount` of work; `size` describes the call."""
        return {"per_s": amount / self.seconds, "spread": self.spread, "repetitions": self.repetitions, "size": list(size)}


def peak_dtypes(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes whose products are measured on a device."""
    return _DTYPES["cuda" if device.type == "cuda" else "cpu"]


def matmul_rates(
    sizes: Mapping[str, Sequence[int]], device: torch.device, limit_s: float, on_size: Callable[[], None]
) -> dict[str, dict[str, MeasuredRate]]:
    """Return FLOP/s of one rank by dtype and class of shape, 2 FLOPs for each multiply-add.

    They are of the fastest memory layout of those in a layer's forward and backward. Where a processor has no instructions for
    a dtype, layouts differ: in bfloat16 by a factor of 16 on an AMD EPYC with AVX2 alone.

    Args:
        sizes: by class, (batch, rows, columns, inner) of the products.
        limit_s: repetitions of one size end after about as long.
        on_size: called after each size of each dtype.
    """
    rates: dict[str, dict[str, MeasuredRate]] = {}
    for dtype in peak_dtypes(device):
        rates[dtype] = {}
        for name, (batch, rows, columns, inner) in sizes.items():
            storage = torch.float32 if dtype == TF32 else getattr(torch, dtype)
            left = torch.randn(batch, rows, inner, device=device).to(storage)
            right = torch.randn(batch, inner, columns, device=device).to(storage)
            with _tf32(dtype == TF32):
                layout = fastest(_products(left[:, :_COMPARED_ROWS], right), device)
                timing = time_together(_products(left, right)[layout], device, limit_s)
            rates[dtype][name] = timing.rate(2.0 * batch * rows * columns * inner, sizes[name])
            on_size()
    return rates


def copy_rate(size: int, device: torch.device, limit_s: float) -> MeasuredRate:
    """Return bytes/s, read and written together, of copies between two buffers of `size` bytes on this rank."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return time_together(lambda: target.copy_(source), device, limit_s).rate(2.0 * size, [size])


def update_rate(size: int, device: torch.device, limit_s: float) -> MeasuredRate:
    """Return bytes/s, read and written together, of updates in place of a buffer of `size` bytes, as optimizers do them.

    They are faster than copies where a processor reads the memory that it is about to overwrite.
    """
    buffer = torch.ones(size // 4, device=device)
    return time_together(lambda: buffer.mul_(1.0), device, limit_s).rate(2.0 * size, [size])


def all_reduce_rate(size: int, device: torch.device, limit_s: float) -> MeasuredRate | None:
    """Return bytes/s of all-reduces of `size` bytes, or None for one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    buffer = torch.zeros(size // 4, device=device)
    return time_together(lambda: dist.all_reduce(buffer), device, limit_s).rate(size, [size])


def bfloat16_slowdown() -> float:
    """Return the time of products of a layer, forward and backward, in bfloat16 over that in float32, on this processor.

    On one thread: several wait for one another, also for one that another process keeps from running.
    """
    device, threads = torch.device("cpu"), torch.get_num_threads()
    seconds = {}
    torch.set_num_threads(1)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            left, right = (torch.randn(1, rows, columns).to(dtype) for rows, columns in ((64, 512), (512, 512)))
            seconds[dtype] = sum(min(_tried(call, device)) for call in _products(left, right))
    finally:
        torch.set_num_threads(threads)
    return seconds[torch.bfloat16] / seconds[torch.float32]


def time_together(call: Callable[[], object], device: torch.device, limit_s: float) -> CallTiming:
    """Time a call that all ranks make at the same time, until its times are stable or `limit_s` has passed.

    A GPU does the same work for a second before.
    """
    time_calls(call, 1, device)  # allocates, and chooses kernels
    calls = max(1, int(_REPETITION_S / max(max_over_ranks([time_calls(call, 1, device)], device)[0], 1e-9)))
    for _ in range(ceil(_SUSTAINED_S[device.type] / _REPETITION_S)):  # as often on every rank: a call may be a collective
        time_calls(call, calls, device)
    seconds: list[float] = []
    for _ in range(_MAX_ROUNDS):
        seconds += max_over_ranks([time_calls(call, calls, device) for _ in range(_ROUND)], device)
        if _spread(seconds) <= _STABLE or sum(seconds) * calls > limit_s:
            break
    return CallTiming(median(seconds), _spread(seconds), len(seconds))


def _spread(seconds: list[float]) -> float:
    low, middle, high = quantiles(seconds, n=4)
    return (high - low) / middle


def fastest(calls: Sequence[Callable[[], object]], device: torch.device) -> int:
    """Return the index of the call that took the least time on the slowest rank, the same on all ranks."""
    seconds = [min(_tried(call, device)) for call in calls]
    return seconds.index(min(seconds))


def _tried(call: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds of a few calls on the slowest rank; of one that takes long, fewer."""
    time_calls(call, 1, device)  # allocates, and chooses kernels
    seconds: list[float] = []
    while len(seconds) < _ROUND and sum(seconds) < _COMPARED_S:
        seconds += max_over_ranks([time_calls(call, 1, device)], device)
    return seconds


def _products(left: torch.Tensor, right: torch.Tensor) -> list[Callable[[], object]]:
    """Return the product in the layouts of forward and of the gradients of a linear layer's inputs and weights."""
    out = torch.empty(*left.shape[:2], right.shape[2], device=left.device, dtype=left.dtype)
    by_columns = left.mT.contiguous().mT, right.mT.contiguous().mT
    return [_product(*factors, out) for factors in ((left, by_columns[1]), (left, right), (by_columns[0], right))]


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    if left.shape[0] > 1:
        return partial(torch.bmm, left, right, out=out)
    # Views made in each call would take longer than a small product on a GPU, whose rate would then be that of the host.
    return partial(torch.mm, left[0], right[0], out=out[0])


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
