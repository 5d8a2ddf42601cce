"""The gradient norm, in float32 whatever the gradients are, without a float32 copy of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchbox.optim.passes import functions_for, passable, sum_of_squares

if TYPE_CHECKING:
    from collections.abc import Iterable

# On a CPU elements are upcast this many at a time, which stay in the cache between the upcast and the norm.
_PIECE_ELEMENTS = 2**20
# A CPU adds up a row with few accumulators: over 2^20 equal elements their rounding has been seen to reach 2e-4 of the norm.
# Rows this short keep it below 1e-6.
_ROW_ELEMENTS = 2**8


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of what this rank holds of the gradients: () float32 on `device`.

    A norm taken in bfloat16 is off by up to 2^-9 of itself, and the sum over many tensors by more: every element is squared in
    float32.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    held = [(gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach() for gradient in gradients]
    passed = [local for local in held if local.dtype == torch.bfloat16 and passable(local)]
    functions = functions_for(sum(local.numel() for local in passed))
    if functions is not None:
        total += sum_of_squares(functions, passed)
        taken = set(map(id, passed))
        held = [local for local in held if id(local) not in taken]
    scratch = torch.empty(_PIECE_ELEMENTS if held else 0, dtype=torch.float32, device="cpu")
    on_cpu = []
    for local in held:
        if local.device.type == "cpu":
            on_cpu += [_row_norms(piece, scratch) for piece in local.reshape(-1).split(_PIECE_ELEMENTS)]
        elif local.numel():
            norm = torch.linalg.vector_norm(local, dtype=torch.float32)
            total += (norm * norm).to(device)
    if on_cpu:
        rows = torch.cat(on_cpu).double()
        total += torch.dot(rows, rows).to(device)
    return total


def _row_norms(piece: Tensor, scratch: Tensor) -> Tensor:
    """Norms of the rows of a flat piece: (ceil(elements / _ROW_ELEMENTS),) float32."""
    elements = piece.numel()
    rows = -(-elements // _ROW_ELEMENTS)
    upcast = scratch[: rows * _ROW_ELEMENTS]
    upcast[:elements].copy_(piece)
    if elements < upcast.numel():
        upcast[elements:] = 0
    norms: Tensor = torch.linalg.vector_norm(upcast.view(rows, _ROW_ELEMENTS), dim=1)
    return norms


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply gradients by so that their norm is at most `max_norm`: () float32 in [0, 1]; no host synchronisation.

    The small constant is that of `torch.nn.utils.clip_grad_norm_`, so that every backend clips alike.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
