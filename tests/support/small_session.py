"""A session of one process that steps a linear layer, for tests of the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchbox.backends.base import Prepared
from benchbox.backends.replicated import Single
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
    averages = spikes = None

    def __init__(self, seed: int = 0, width: int = 8) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5))
        masters = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optimizer = MasterWeightOptimizer(self.model.bfloat16().parameters(), masters=masters, lr=OPTIM.lr, fused=True)
        schedule = build_schedule(self.optimizer, OPTIM)
        self.backend = Single()
        self.backend.device = self.device
        self.backend.prepared = Prepared(self.model, self.optimizer, self.optimizer, schedule)

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


def batches(start: int = 0, width: int = 8) -> Iterator[Tensor]:
    """Yield the batches (2, width) from step `start` on, without end."""
    while True:
        yield torch.randn(2, width, generator=torch.Generator().manual_seed(start)).bfloat16()
        start += 1
