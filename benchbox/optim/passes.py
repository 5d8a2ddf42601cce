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


def step_adamw(functions: ctypes.CDLL, jobs: Sequence[AdamWJob]) -> None:
    """Step the elements of each job, on torch's threads."""
    functions.adamw((AdamWJob * len(jobs))(*jobs), len(jobs), torch.get_num_threads())


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
