"""A small model, its masters, and gradients for it in any dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchbox.optim import MasterWeightOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "fused": True}


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8))


def live_model(seed: int = 0) -> nn.Sequential:
    return model(seed).to(torch.bfloat16)


def master_optimizer(live: nn.Module, full: list[Tensor] | None, **changes: Any) -> MasterWeightOptimizer:
    return MasterWeightOptimizer(live.parameters(), torch.optim.AdamW, masters=full, **(ADAMW | changes))


def set_gradients(live: nn.Module, step: int) -> None:
    """Set the gradients of a step: the same numbers for models of any dtype, rounded to it."""
    for index, parameter in enumerate(live.parameters()):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + index))
        parameter.grad = drawn.to(parameter.dtype)


def upcast_gradients(full: nn.Module, live: nn.Module) -> None:
    """Copy the gradients of a 16-bit model to a float32 model."""
    for parameter, rounded in zip(full.parameters(), live.parameters(), strict=True):
        parameter.grad = None if rounded.grad is None else rounded.grad.float()


def all_equal(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Return whether tensors are equal, pair by pair, to the last bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
