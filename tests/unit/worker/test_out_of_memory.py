"""Failed allocations are recognised in every form, and errors that only mention memory are not.

The errors of CUDA, cuBLAS, cuDNN and NCCL are constructed with the texts of their sources: nothing here was run on a GPU.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from benchbox.worker.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

NCCL_ERROR = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, unhandled cuda error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\n"
)
NCCL_OUT_OF_MEMORY = f"{NCCL_ERROR}Cuda failure 2 'out of memory'"


def accelerator_error(message: str, code: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError(message)
    error.error_code = code  # type: ignore[attr-defined]  # as torch's C++ sets it
    return error


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(10**15),
        lambda: torch.zeros(10**15, dtype=torch.uint8),
        lambda: torch.ones(1).expand(10**15).clone(),
        lambda: bytearray(10**15),
        lambda: [None] * 10**15,
    ],
)
def test_an_allocation_of_the_host_that_fails_is_out_of_memory(allocate: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        allocate()
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        accelerator_error("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", 2),
        accelerator_error("any text", 2),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."
        ),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        dist.DistBackendError(NCCL_OUT_OF_MEMORY),
        dist.DistBackendError(f"{NCCL_ERROR}Cuda failure 'out of memory'"),
        dist.DistBackendError(f"{NCCL_ERROR}Failed to CUDA calloc async 2432 bytes"),
    ],
)
def test_an_error_that_means_a_failed_allocation_is_out_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    ("cause", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (ValueError("an operator is not supported"), False),
    ],
)
def test_a_compilation_that_runs_out_of_memory_is_out_of_memory(cause: Exception, is_memory: bool) -> None:
    """torch.compile wraps whatever its backend raises, and does not chain it."""

    def backend(*_: object) -> Callable[..., object]:
        raise cause

    with pytest.raises(RuntimeError, match="raised") as raised:
        torch.compile(lambda value: value + 1, backend=backend)(torch.ones(2))
    assert is_out_of_memory(raised.value) == is_memory


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the last launch ran out of memory"),
        RuntimeError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
        RuntimeError("No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 262144"),  # shared memory
        RuntimeError("while handling: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("see DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("[enforce fail at inline_container.cc:659] unexpected pos\nDefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
        ValueError("CUDA driver error: out of memory"),
        accelerator_error("CUDA error: out of memory", 700),  # the code decides: cudaErrorIllegalAddress
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        dist.DistBackendError(f"{NCCL_ERROR}Cuda failure 802 'system not yet initialized'"),
        dist.DistBackendError("peer reported: Last error:\nCuda failure 2 'out of memory'"),
        dist.DistNetworkError(NCCL_OUT_OF_MEMORY),
        RuntimeError(NCCL_OUT_OF_MEMORY),
        OSError(errno.ENOSPC, "Cannot allocate memory"),
        KeyboardInterrupt(),
    ],
)
def test_an_error_that_only_mentions_memory_is_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)
