"""A policy and its batch on fake tensors: shapes, dtypes and storages without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch

# Fields of a batch below this size keep their values: masks and tokens decide which parts of a policy run.
_MAX_REAL_BYTES = 2**20


def new_fake_mode() -> FakeTensorMode:
    """Return a mode in which fake tensors meet real ones, which stay what they are."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def make_fake(policy: nn.Module, mode: FakeTensorMode) -> list[Tensor]:
    """Replace the parameters and buffers of a policy by fake ones, and return these. Shared ones stay shared."""
    replacements: dict[int, tuple[Tensor, Tensor]] = {}
    for module in policy.modules():
        for tensors in (module._parameters, module._buffers):  # noqa: SLF001 (they are replaced in place)
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in replacements:
                    replacements[id(tensor)] = (tensor, _fake_like(tensor, mode))
                tensors[name] = replacements[id(tensor)][1]  # type: ignore[assignment]
    return [fake for _, fake in replacements.values()]


def make_fake_batch(batch: Batch, mode: FakeTensorMode) -> Batch:
    """Return the batch with its large fields, such as images, on fake tensors."""
    fake: Batch = {}
    for name, value in batch.items():
        if value.nbytes > _MAX_REAL_BYTES:
            with mode:
                fake[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        else:
            fake[name] = value
    return fake


def _fake_like(tensor: Any, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
