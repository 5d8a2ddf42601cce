"""A tiny policy, its data, and handwritten masters, which the scripts in `cases/` share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Policy(nn.Module):
    """Two matrices with a norm between them, whose weight starts at 1.0, where bfloat16 is coarse for small updates."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Linear(16, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16)

    def forward(self, observation: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.backbone(observation))))


def batches(count: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Yield batches of shape (8, 16), equal in every run and different on every rank."""
    generator = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))
    for _ in range(count):
        yield torch.randn(8, 16, generator=generator, dtype=torch.float32).to(dtype)


def loss_of(policy: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Return the mean squared error between the output of the policy and its input."""
    return (policy(batch).float() - batch.float()).square().mean()


def join_ranks() -> None:
    """Initialise the process group unless an earlier script in these processes has done so."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


class Masters(torch.optim.Optimizer):
    """Float32 copies of 16-bit parameters, stepped by AdamW and rounded back: a minimal correct implementation."""

    def __init__(self, live: Iterable[nn.Parameter], **options: Any) -> None:
        self.live = list(live)
        self.masters = [parameter.detach().float().clone().requires_grad_() for parameter in self.live]
        self.inner = torch.optim.AdamW(self.masters, **options)
        super().__init__(self.masters, self.inner.defaults)
        self.param_groups = self.inner.param_groups  # so that a schedule built on this sets the rates of the inner optimizer

    def copy_gradients(self) -> None:
        for parameter, master in zip(self.live, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def round_into_live(self) -> None:
        for parameter, master in zip(self.live, self.masters, strict=True):
            parameter.copy_(master)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.copy_gradients()
        self.inner.step()
        self.round_into_live()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.live:
            parameter.grad = None
