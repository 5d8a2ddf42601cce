"""A session of one process that steps a linear layer, for tests of the trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchbox.backends.base import Prepared
from benchbox.measure.phases import NONE
from benchbox.optim import MasterWeightOptimizer, build_schedule
from benchbox.session import StepResult
from benchbox.spec.cell import OptimSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTIM = OptimSpec(lr=1e-2, schedule="warmup_cosine", warmup_steps=2, total_steps=8)


class SmallSession:
    """Bfloat16 weights with float32 masters, a schedule, and dropout, which draws from the generator of the process."""

    device = torch.device("cpu")

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        masters = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optimizer = MasterWeightOptimizer(self.model.bfloat16().parameters(), masters=masters, lr=OPTIM.lr)
        schedule = build_schedule(self.optimizer, OPTIM)
        self.backend = SimpleNamespace(prepared=Prepared(self.model, self.optimizer, self.optimizer, schedule))

    def step(self, batches: Iterator[Tensor], instruments: Any = NONE) -> StepResult:
        batch = next(batches)
        loss = (self.model(batch) - batch).float().square().mean()
        loss.backward()
        grad_norm = self.optimizer.clip_grad_norm_(1.0)
        rates = tuple(group["lr"] for group in self.optimizer.param_groups)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.backend.prepared.schedule.step()
        parts, counts = {"square": loss.detach()}, {"square": torch.tensor(float(len(batch)))}
        return StepResult(loss.detach(), grad_norm, parts, len(batch), rates, counts)


def batches(start: int = 0) -> Iterator[Tensor]:
    """Yield the batches (2, 8) from step `start` on, without end."""
    while True:
        yield torch.randn(2, 8, generator=torch.Generator().manual_seed(start)).bfloat16()
        start += 1
