"""Operations on lists of tensors: a few multi-tensor kernels for all of them, or one kernel for each tensor.

Both give the same bits. On an accelerator the start of a kernel costs more than the work on a small tensor. On a CPU there is
no such cost: torch's functions loop over the tensors themselves, and the checks of its copies made a step slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable


def uses_multi_tensor(device: torch.device) -> bool:
    """Return whether lists of tensors on that device are processed by multi-tensor kernels."""
    return device.type != "cpu"


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into the target at its index, in the dtype of the target. All are on one device."""
    if targets and uses_multi_tensor(targets[0].device):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def multiply_tensors(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a () tensor, which is cast to the dtype of each of them."""
    for group in group_tensors(tensors):
        torch._foreach_mul_(group, factor.to(group[0]))  # on a CPU too: it takes a quarter of the time of one `mul_` for each


def vector_norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor, computed in float32: (number of tensors,). All have one device and one dtype."""
    if uses_multi_tensor(tensors[0].device):
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))  # noqa: SLF001 (it has no public name)
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])


def group_tensors(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return the tensors in groups of one device and one dtype, which one kernel can take."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups.values()
