"""Compiled passes over many CPU tensors at once, shared out over threads."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from benchbox.optim.native import library

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Sequence

    from torch import Tensor

# Fewer elements are not worth a compilation, nor waking threads.
WORTHWHILE_ELEMENTS = 2**22
_CHUNK_ELEMENTS = 2**18  # what threads are handed: small enough to balance, large enough that calling costs nothing beside it
# torch's kernels round what is left over after whole vectors otherwise; such tensors are left to torch.
_VECTOR_ELEMENTS = 16


def functions_for(elements: int) -> ctypes.CDLL | None:
    """The compiled functions, if there are any and this is work enough."""
    return library() if elements >= WORTHWHILE_ELEMENTS else None


def passable(*tensors: Tensor) -> bool:
    """Whether a pass can run through these together: on the CPU, each in one stretch of memory of whole vectors."""
    return all(in_memory(tensor) and tensor.numel() % _VECTOR_ELEMENTS == 0 for tensor in tensors)


def in_memory(tensor: Tensor) -> bool:
    """Whether its elements lie side by side at its address. Those of a subclass may be elsewhere, or not there yet."""
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    return plain and tensor.is_contiguous()


def sum_of_squares(functions: ctypes.CDLL, tensors: Sequence[Tensor]) -> float:
    """Of `passable` bfloat16 tensors. The sum does not depend on the number of threads."""
    jobs = [(tensor.data_ptr() + 2 * start, size // 2) for tensor in tensors for start, size in _chunks(tensor.numel())]
    return math.fsum(_shared_out(functions.sum_of_squares, jobs, [size for _, size in jobs]))


def adamw(functions: ctypes.CDLL, steps: Sequence[tuple[Sequence[Tensor], Sequence[float]]]) -> None:
    """Step each (master, first moment, second moment, gradient, live weight) with its coefficients, as named in `native.c`."""
    jobs, sizes = [], []
    for tensors, coefficients in steps:
        pointers = [(tensor.data_ptr(), tensor.element_size()) for tensor in tensors]
        for start, size in _chunks(tensors[0].numel()):
            jobs.append((*(pointer + start * width for pointer, width in pointers), size, *coefficients))
            sizes.append(size)
    _shared_out(functions.adamw, jobs, sizes)
    # Autograd refuses a backward pass over weights that were written since the forward pass, but only torch tells it.
    for master, first, second, _, live in (tensors for tensors, _ in steps):
        torch.autograd.graph.increment_version((master, first, second, live))


def _chunks(elements: int) -> list[tuple[int, int]]:
    """(start, size) of each."""
    return [(start, min(_CHUNK_ELEMENTS, elements - start)) for start in range(0, elements, _CHUNK_ELEMENTS)]


def _shared_out(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], sizes: Sequence[int]) -> list[Any]:
    """The results of all jobs, in order. Each of torch's number of threads takes a stretch of them of about the same size.

    ctypes lets go of the interpreter during a call. OpenMP would bring a second pool of threads beside torch's, and both spin
    while they wait.
    """
    threads = torch.get_num_threads()
    total, before = sum(sizes), 0
    shares: list[list[tuple[Any, ...]]] = [[] for _ in range(threads)]
    for job, size in zip(jobs, sizes, strict=True):
        shares[min(threads - 1, before * threads // total)].append(job)
        before += size

    def work(share: list[tuple[Any, ...]]) -> list[Any]:
        return [function(*job) for job in share]

    if threads == 1:
        return work(shares[0])
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(work, share) for share in shares[1:]]
        return sum((other.result() for other in others), work(shares[0]))
