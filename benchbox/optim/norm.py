"""The gradient norm in float32 for gradients of any dtype, without a float32 copy of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchbox.observer.introspect.tensors import local_shard
from benchbox.optim.multi_tensor import group_tensors, multiply_tensors, uses_multi_tensor, vector_norms
from benchbox.optim.passes import native_functions, sum_of_squares, supports_native

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# On a CPU this many elements are upcast at a time; they stay in the cache between the upcast and the norm.
_CHUNK_ELEMENTS = 2**20
# A CPU adds up a row with few accumulators: for 2^20 equal elements their rounding error reached 2e-4 of the norm (measured).
# Rows of this length keep it below 1e-6.
_ROW_ELEMENTS = 2**8


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares over this rank's shards of the gradients: () float32 on `device`.

    Every element is squared in float32: a norm computed in bfloat16 has a relative error of up to 2^-9, and a sum over many
    tensors a larger one.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    local_gradients = [local_shard(gradient).detach() for gradient in gradients]
    native = [local for local in local_gradients if local.dtype == torch.bfloat16 and supports_native(local)]
    functions = native_functions(sum(local.numel() for local in native))
    if functions is not None:
        total += sum_of_squares(functions, native)
        native_ids = set(map(id, native))
        local_gradients = [local for local in local_gradients if id(local) not in native_ids]
    for group in group_tensors(local for local in local_gradients if uses_multi_tensor(local.device) and local.numel()):
        norms = vector_norms(group)
        total += torch.dot(norms, norms).to(device)
    cpu_gradients = [local for local in local_gradients if not uses_multi_tensor(local.device)]
    scratch = torch.empty(_CHUNK_ELEMENTS if cpu_gradients else 0, dtype=torch.float32, device="cpu")
    cpu_norms = []
    for local in cpu_gradients:
        cpu_norms += [_row_norms(chunk, scratch) for chunk in local.reshape(-1).split(_CHUNK_ELEMENTS)]
    if cpu_norms:
        rows = torch.cat(cpu_norms).double()
        total += torch.dot(rows, rows).to(device)
    return total


def _row_norms(chunk: Tensor, scratch: Tensor) -> Tensor:
    """Return the norms of the rows of a 1-D chunk: (ceil(elements / _ROW_ELEMENTS),) float32."""
    elements = chunk.numel()
    rows = -(-elements // _ROW_ELEMENTS)
    upcast = scratch[: rows * _ROW_ELEMENTS]
    upcast[:elements].copy_(chunk)
    if elements < upcast.numel():
        upcast[elements:] = 0
    norms: Tensor = torch.linalg.vector_norm(upcast.view(rows, _ROW_ELEMENTS), dim=1)
    return norms


def scale_gradients(gradients: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply gradients in place by a () tensor; of sharded gradients the shards of this rank."""
    multiply_tensors(map(local_shard, gradients), coefficient)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that scales gradients to a norm of at most `max_norm`: () float32 in [0, 1].

    There is no host synchronisation. The epsilon is that of `torch.nn.utils.clip_grad_norm_`, so that all backends clip alike.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
