"""The gradient norm in float32 for gradients of any dtype, without a float32 copy of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchbox.observer.introspect.tensors import local_shard
from benchbox.optim.multi_tensor import group_tensors, multiply_tensors, uses_multi_tensor, vector_norms
from benchbox.optim.passes import native_functions, sum_of_squares, supports_native

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
    norms_of_rows = [_row_norms(parts, scratch) for parts in _parts_of_chunks(cpu_gradients)]
    if norms_of_rows:
        rows = torch.cat(norms_of_rows).double()
        total += torch.dot(rows, rows).to(device)
    return total


def _parts_of_chunks(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of 1-D parts of the gradients, of at most _CHUNK_ELEMENTS together.

    A policy has many small parameters, and operations on each of them would cost more than its values.
    """
    parts: list[Tensor] = []
    elements = 0
    for gradient in gradients:
        for part in gradient.reshape(-1).split(_CHUNK_ELEMENTS):
            if elements + part.numel() > _CHUNK_ELEMENTS:
                yield parts
                parts, elements = [], 0
            parts.append(part)
            elements += part.numel()
    if parts:
        yield parts


def _row_norms(parts: list[Tensor], scratch: Tensor) -> Tensor:
    """Return the norms of the rows of 1-D parts, one after the other: (ceil(elements / _ROW_ELEMENTS),) float32."""
    elements = sum(part.numel() for part in parts)
    rows = -(-elements // _ROW_ELEMENTS)
    upcast = scratch[: rows * _ROW_ELEMENTS]
    torch.cat(parts, out=upcast[:elements])
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
