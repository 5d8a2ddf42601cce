"""Calls of the compiled functions on many CPU tensors, distributed over threads."""

from __future__ import annotations

import ctypes
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch._C._profiler import _RecordFunctionFast

from benchbox.optim.native import PART_ELEMENTS, AdamWJob, SquaresJob, library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

# Fewer elements are not worth a compilation, nor the start of threads.
MIN_NATIVE_ELEMENTS = 2**22
# Called by every pass with the tensors that it reads and those that it writes: passes are no operations, and no dispatch mode
# sees them. While there are any, passes are annotated in traces of torch's profiler.
pass_listeners: list[Callable[[Iterable[Tensor], Iterable[Tensor]], None]] = []
# torch's kernels round the elements that do not fill a vector differently; tensors with such elements are left to torch.
_VECTOR_ELEMENTS = 16


def native_functions(elements: int) -> ctypes.CDLL | None:
    """Return the compiled functions if they are available and worthwhile for that many elements."""
    return library() if elements >= MIN_NATIVE_ELEMENTS else None


def supports_native(tensor: Tensor) -> bool:
    """Return whether the compiled functions accept this tensor: contiguous on the CPU, with a whole number of vectors."""
    return tensor.device.type == "cpu" and is_dense(tensor) and tensor.numel() % _VECTOR_ELEMENTS == 0


def is_dense(tensor: Tensor) -> bool:
    """Return whether all elements are at the tensor's address. Those of a subclass may be elsewhere, or not computed yet."""
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.is_contiguous()


def sum_of_squares(functions: ctypes.CDLL, tensors: Sequence[Tensor]) -> float:
    """Return the sum of squares of bfloat16 tensors that `supports_native` accepts, independent of the number of threads."""
    counts = [tensor.numel() for tensor in tensors]
    jobs = (SquaresJob * len(tensors))(*map(SquaresJob, counts, [tensor.data_ptr() for tensor in tensors]))
    sums = (ctypes.c_double * sum(-(-count // PART_ELEMENTS) for count in counts))()
    with announced("sum_of_squares", lambda: (tensors, ())):
        functions.sum_of_squares(jobs, len(jobs), sums, torch.get_num_threads())
    return math.fsum(sums)


def step_adamw(functions: ctypes.CDLL, steps: Sequence[tuple[Sequence[Tensor], Sequence[float]]]) -> None:
    """Step each (master, exp_avg, exp_avg_sq, gradient, live weight) with its coefficients, in the order of `native.c`."""
    jobs = (AdamWJob * len(steps))(
        *[AdamWJob(tensors[0].numel(), *map(torch.Tensor.data_ptr, tensors), *coefficients) for tensors, coefficients in steps]
    )
    with announced("adamw", lambda: _read_and_written([tensors for tensors, _ in steps])):
        functions.adamw(jobs, len(jobs), torch.get_num_threads())
    # Autograd refuses a backward pass over weights written since the forward pass, but only torch's own operations inform it.
    torch.autograd.graph.increment_version([tensor for (*masters, _, live), _ in steps for tensor in (*masters, live)])


@contextmanager
def announced(name: str, tensors: Callable[[], tuple[Iterable[Tensor], Iterable[Tensor]]]) -> Iterator[None]:
    """Run a pass inside the with block, and call the listeners with the tensors that it reads and those that it writes."""
    if not pass_listeners:
        yield
        return
    # As an operation: the profiler counts kernels for the innermost operation, and for no annotation of the user.
    with _RecordFunctionFast(f"benchbox::{name}"):
        yield
    for listener in pass_listeners:
        listener(*tensors())


def _read_and_written(steps: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that a step of AdamW reads (all but the live weights) and those that it writes (all but gradients)."""
    read = [tensor for *masters, gradient, _ in steps for tensor in (*masters, gradient)]
    written = [tensor for *masters, _, live in steps for tensor in (*masters, live)]
    return read, written
