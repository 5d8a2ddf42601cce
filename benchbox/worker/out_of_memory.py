"""Recognition of exceptions that mean that memory could not be allocated.

By class where there is one, by error code where the class carries one. Several libraries raise a plain RuntimeError instead.
Those are recognised by the fixed text that they begin with, so that an error that merely mentions memory is not taken for one.
"""

from __future__ import annotations

import errno
import re

import torch
import torch.distributed as dist

_CUDA_ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation, and hipErrorOutOfMemory

# Errors without a class or code of their own: class, the beginning of the message, and where it is raised.
_MESSAGES: tuple[tuple[type[BaseException], re.Pattern[str]], ...] = (
    # c10/core/impl/alloc_cpu.cpp: the host has no memory
    (
        RuntimeError,
        re.compile(r"\[enforce fail at alloc_cpu\.cpp:\d+\] [^\n]*DefaultCPUAllocator: (can't allocate|not enough) memory"),
    ),
    # ATen/cuda/Exceptions.h, TORCH_CUDABLAS_CHECK: no memory for a handle or workspace
    (RuntimeError, re.compile(r"CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `")),
    # ATen/cuda/Exceptions.h, AT_CUDNN_CHECK: the status of cuDNN before version 9, then those from 9 on
    (RuntimeError, re.compile(r"cuDNN error: CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)\b")),
    # ATen/cuda/Exceptions.h, AT_CUDA_DRIVER_CHECK: text of cuGetErrorString
    (RuntimeError, re.compile(r"CUDA driver error: out of memory\b")),
    # triton/backends/nvidia/driver.c, gpuAssert: the same text; modules of kernels are loaded beside the caching allocator
    (RuntimeError, re.compile(r"Triton Error \[CUDA\]: out of memory\b")),
    # c10/cuda/CUDAException.cpp, for an AcceleratorError that lost its code: a loader's worker raises it anew
    (torch.AcceleratorError, re.compile(r"CUDA error: out of memory\b")),
    # torch/csrc/distributed/c10d/NCCLUtils.hpp, C10D_NCCL_CHECK, with the last error of NCCL in its checks.h or alloc.h
    (
        dist.DistBackendError,
        re.compile(
            r"NCCL error in: [^\n]*\nncclUnhandledCudaError: .*^Last error:\n"
            r"(Cuda failure (2 )?'out of memory'|Failed to CUDA (m|c)alloc )",
            re.DOTALL | re.MULTILINE,
        ),
    ),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory could not be allocated, on the device or on the host."""
    # torch._dynamo's BackendCompilerFailed and torch._inductor's InductorError: the cause is raised "from None".
    if isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        return is_out_of_memory(inner)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):  # as of a fork: Python has no class for it
        return error.errno == errno.ENOMEM
    if isinstance(error, torch.AcceleratorError) and (code := getattr(error, "error_code", None)) is not None:
        return bool(code == _CUDA_ERROR_MEMORY_ALLOCATION)
    message = str(error)
    return any(isinstance(error, kind) and pattern.match(message) for kind, pattern in _MESSAGES)
